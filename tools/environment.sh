# Sourced by tools/test, tools/demo, tools/sanitize and .ci/run: an environment of the checkout's own, in .flagos/.
# What the machine has set or installed does not matter, beyond a Python, a C++ compiler and where pip finds packages.
# shellcheck shell=bash
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
state="$root/.flagos"
venv="$state/venv"

say() { printf '\n== %s\n' "$*"; }

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# help "$@": where the first argument asks for it, prints how the script that calls it is used, its first comment, and ends.
help() {
  [[ "${1:-}" == -h || "${1:-}" == --help ]] || return 0
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
  exit
}

# Removes settings that change what is built or tested. CC, CXX, FLAGOS_PYTHON and FLAGOS_TEST_* are choices, and stay.
isolate() {
  local name
  for name in $(compgen -e); do
    case "$name" in
      FLAGOS_PYTHON | FLAGOS_TEST_*) ;;
      FLAGOS_* | JAX_* | XLA_* | TF_* | PJRT_* | PYTHON* | SKBUILD_* | CMAKE_* | *FLAGS | VIRTUAL_ENV | CONDA_*) unset "$name" ;;
      LD_PRELOAD | LD_LIBRARY_PATH | PYTEST_* | MYPY* | RUFF_* | PIP_TARGET | PIP_PREFIX | PIP_USER | PIP_REQUIRE_VIRTUALENV) unset "$name" ;;
    esac
  done
  # Archives hold the time of the commit, so that one commit has one wheel.
  SOURCE_DATE_EPOCH="$(git -C "$root" log -1 --format=%ct 2>/dev/null || echo 315532800)"
  export SOURCE_DATE_EPOCH
  export PYTHONNOUSERSITE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
}

find_python() {
  local candidate
  for candidate in "${FLAGOS_PYTHON:-}" python3 python3.11 python3.12 python3.13; do
    if [[ -n "$candidate" ]] && "$candidate" -c \
      'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      "$candidate" -c 'import sys; print(sys.executable)'
      return
    fi
  done
  die "no Python 3.11 to 3.13 with venv and ensurepip found; install one (Debian: python3-venv) or set FLAGOS_PYTHON"
}

# Runs a command quietly; shows what it said if it fails.
quietly() {
  local log="$state/log-$BASHPID"
  if ! "$@" >"$log" 2>&1; then
    tail -n 60 "$log" >&2
    die "failed: $*"
  fi
  rm "$log"
}

digest() { sha256sum | cut -d' ' -f1; }

# install EXTRA ARGUMENT...: pip install. Where only tests run, what is imported gets its bytecode when it is imported: of
# the 17,000 modules that are installed that is a quarter, and pip takes two minutes of processor time for all of them.
install() {
  local options=()
  [[ "$1" == demo ]] || options=(--no-compile)
  "$venv/bin/python" -m pip install "${options[@]}" "${@:2}"
}

# prepare EXTRA: a virtual environment with the pinned dependencies of EXTRA and a freshly built wheel of this checkout.
prepare() {
  local extra="$1" python constraints wanted wheel stale="" installing="" failed=""
  mkdir -p "$state"
  exec 9>"$state/lock" # which those that pip starts hold too
  flock 9
  python="$(find_python)"
  constraints="$root/tools/constraints/python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt"
  # Where build isolation reads its pins from differs between versions of pip.
  export PIP_CONSTRAINT="$constraints" PIP_BUILD_CONSTRAINT="$constraints"
  command -v "${CXX:-c++}" >/dev/null || die "no C++ compiler found; install one (Debian: g++) or set CXX"

  wanted="$("$python" -c 'import sys; print(sys.executable, sys.version)' | cat - "$constraints" | digest)"
  if [[ "$(cat "$venv/flagos-environment" 2>/dev/null)" != "$wanted" ]]; then
    say "Creating .flagos/venv ($("$python" --version))"
    rm -rf "$venv"
    quietly "$python" -m venv "$venv"
    quietly "$venv/bin/python" -m pip install --upgrade pip
    echo "$wanted" >"$venv/flagos-environment"
  fi

  [[ "${FLAGOS_TEST_WERROR:-}" != 1 ]] || export SKBUILD_CMAKE_DEFINE=FLAGOS_WERROR=ON
  wanted="$(cd "$root" && {
    echo "${SKBUILD_CMAKE_DEFINE:-}"
    git rev-parse HEAD 2>/dev/null || true
    find plugin_abi flagos_backend proto manifests pyproject.toml CMakeLists.txt README.md tools/build_facts.py -type f \
      -not -path '*/__pycache__/*' -not -path '*/lib/*' -not -name 50_flagos.json -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
  } | digest)"
  if [[ "$(cat "$venv/flagos-wheel" 2>/dev/null)" != "$wanted" ]]; then
    stale=1
    rm -rf "$state/dist" "$venv/flagos-wheel" "$venv"/flagos-extra-*
  fi
  if [[ ! -e "$venv/flagos-extra-$extra" ]]; then
    say "Installing the dependencies of flagos[$extra], as pinned in ${constraints#"$root/"}"
    # Beside the compiler: what comes over a network leaves a processor to others.
    "$venv/bin/python" "$root/tools/requirements.py" "$extra" >"$state/requirements.txt"
    (quietly install "$extra" --requirement "$state/requirements.txt") &
    installing=$!
  fi
  if [[ -n "$stale" ]]; then
    say "Building the wheel"
    (quietly "$venv/bin/python" -m pip wheel --no-deps --wheel-dir "$state/dist" "$root") || failed=1
  fi
  [[ -z "$installing" ]] || wait "$installing" || failed=1
  [[ -z "$failed" ]] || die "the environment is not complete"
  wheel="$(echo "$state"/dist/flagos-*.whl)"
  if [[ -n "$stale" ]]; then
    say "Installing $(basename "$wheel")"
    quietly "$venv/bin/python" -m pip install --no-deps --force-reinstall "$wheel"
    echo "$wanted" >"$venv/flagos-wheel"
  fi
  if [[ -n "$installing" ]]; then
    quietly install "$extra" "$wheel[$extra]" # nothing is left to do, or pip says what is
    # FlagGems works with a newer NumPy than the one that it pins; the tests' extra has what it needs besides.
    [[ "$extra" == demo ]] || quietly install "$extra" --no-deps flag_gems
    touch "$venv/flagos-extra-$extra"
  fi
  flock -u 9
}
