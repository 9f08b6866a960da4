"""The variables that FlagOS' plugins share: what each means, which goes first, and that conflicts are said once."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from flagos_backend import environment
from flagos_backend.errors import ConfigInvalid, KernelPolicyInvalid
from flagos_backend.kernels.implementation import Provider
from flagos_backend.kernels.policy import Policy, Wish

FLAGOS, VENDOR, REFERENCE = Wish(Provider.FLAGOS), Wish(Provider.VENDOR), Wish(Provider.REFERENCE)


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What was warned of; nothing has been before."""
    monkeypatch.setattr(environment, "_said", set())
    caplog.set_level(logging.WARNING, "flagos_backend")
    return caplog


def policy(**variables: str) -> Policy:
    return Policy.from_environment(variables)


@pytest.mark.parametrize("prefix", environment.FAMILIES)
def test_a_family_means_what_ours_means(prefix: str, said: pytest.LogCaptureFixture) -> None:
    values = {
        "PREFER": "vendor",
        "STRICT": "1",
        "PER_OP": "dot=vendor:cuda|flagos;sort=reference",
        "ALLOW_VENDORS": "cuda, nvidia",
        "DENY_VENDORS": "ascend",
        "FLAGOS_BLACKLIST": "mm,to_copy",
    }
    found = policy(**{prefix + key: value for key, value in values.items()})
    assert found == policy(**{"FLAGOS_" + key: value for key, value in values.items()})
    assert found.prefer == (VENDOR,) and found.strict and found.deny == {"ascend"}
    assert found.per_op == {"dot": (Wish(Provider.VENDOR, "cuda"), FLAGOS), "sort": (REFERENCE,)}
    assert found.blacklist == {"mm", "to_copy"} and not said.text


def test_ours_goes_first_and_says_so_once(said: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        assert policy(FLAGOS_PREFER="triton", VLLM_FL_PREFER="vendor").prefer == (Wish(Provider.TRITON),)
    assert [record.getMessage() for record in said.records] == [
        "VLLM_FL_PREFER is 'vendor' and does not count: FLAGOS_PREFER, or another before it, is 'triton'"
    ]


def test_of_two_families_the_first_counts(said: pytest.LogCaptureFixture) -> None:
    found = policy(TE_FL_PREFER="vendor", VLLM_FL_PREFER="flagos", SGLANG_FL_PREFER="flagos")
    assert found.prefer == (FLAGOS,)
    assert len(said.records) == 1 and "TE_FL_PREFER" in said.text


def test_equal_values_are_no_conflict(said: pytest.LogCaptureFixture) -> None:
    policy(FLAGOS_STRICT="1", VLLM_FL_STRICT="true", FLAGOS_DENY_VENDORS="a,b", TE_FL_DENY_VENDORS="b, a")
    assert not said.text


def test_transformer_engines_default_is_flagos() -> None:
    assert policy(TE_FL_PER_OP="dot=vendor:cuda|default").per_op["dot"][1] == FLAGOS


@pytest.mark.parametrize(
    ("name", "value", "known"),
    [
        ("TE_FL_PREFER", "cuda", "flagos, reference, vendor"),
        ("VLLM_FL_STRICT", "maybe", "1 or 0"),
        ("SGLANG_FL_PER_OP", "dot=cuda", "op=flagos|vendor:NAME|reference"),
        ("MG_FL_CONFIG", "/does/not/exist", "No such file"),
    ],
)
def test_wrong_values_of_other_plugins_are_said_and_left_out(
    name: str, value: str, known: str, said: pytest.LogCaptureFixture
) -> None:
    assert policy(**{name: value}) == Policy()
    (record,) = said.records
    assert name in record.getMessage() and known in record.getMessage() and "\n" not in record.getMessage()


@pytest.mark.parametrize(
    ("name", "value"), [("FLAGOS_PREFER", "cuda"), ("FLAGOS_STRICT", "maybe"), ("FLAGOS_PER_OP", "dot")]
)
def test_wrong_values_of_ours_are_errors(name: str, value: str) -> None:
    with pytest.raises(KernelPolicyInvalid, match=f"^{name} holds '{value}'"):
        policy(**{name: value})


def test_lists_exclude_each_other() -> None:
    with pytest.raises(KernelPolicyInvalid, match=r"FLAGOS_FLAGOS_BLACKLIST.*FLAGOS_FLAGOS_WHITELIST"):
        policy(FLAGOS_FLAGOS_WHITELIST="mm", FLAGOS_FLAGOS_BLACKLIST="exp")
    both = policy(VLLM_FL_FLAGOS_WHITELIST="mm", FLAGOS_FLAGOS_BLACKLIST="exp")
    assert not both.whitelist and both.blacklist == {"exp"}


# ---- the file ----


def write(tmp_path: Path, text: str) -> str:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return str(file)


WHOLE = """
prefer: vendor
strict: true
allow_vendors: [cuda]
deny_vendors:
  - ascend
op_backends:
  dot: [vendor:cuda, flagos]
  sort: reference|flagos
flagos_blacklist: [to_copy, mm]
oot_blacklist: [fused_moe]
"""


def test_a_file_says_all_of_it(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    found = policy(FLAGOS_CONFIG=write(tmp_path, WHOLE))
    assert found == Policy(
        prefer=(VENDOR,),
        per_op={"dot": (Wish(Provider.VENDOR, "cuda"), FLAGOS), "sort": (REFERENCE, FLAGOS)},
        strict=True,
        allow=frozenset({"cuda"}),
        deny=frozenset({"ascend"}),
        blacklist=frozenset({"to_copy", "mm"}),
    )
    assert not said.text


def test_a_file_replaces_variables_but_lists(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, "prefer: flagos\nflagos_blacklist: [mm]\n")
    found = policy(FLAGOS_CONFIG=path, FLAGOS_PREFER="vendor", FLAGOS_STRICT="1", FLAGOS_FLAGOS_WHITELIST="exp")
    assert found == Policy(prefer=(FLAGOS,), whitelist=frozenset({"exp"}))
    assert {record.getMessage().split()[0] for record in said.records} == {"FLAGOS_PREFER", "FLAGOS_STRICT"}


def test_a_family_has_its_file(tmp_path: Path) -> None:
    path = write(tmp_path, "prefer: reference\n")
    assert policy(VLLM_FL_CONFIG=path, VLLM_FL_PREFER="vendor").prefer == (REFERENCE,)
    assert policy(VLLM_FL_CONFIG=path, FLAGOS_PREFER="vendor").prefer == (VENDOR,)


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path, "prefer: reference\n")
    assert policy(FLAGOS_CONFIG=path).prefer == (REFERENCE,)
    Path(path).write_text("prefer: vendor\n")
    os.utime(path, ns=(1, 1))
    assert policy(FLAGOS_CONFIG=path).prefer == (VENDOR,)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("prefer: cuda", "prefer is 'cuda', not one of flagos, reference, vendor"),
        ("strict: perhaps", "strict is 'perhaps', not true or false"),
        ("deny_vendors: 3", "deny_vendors is 3, not a list of names"),
        ("op_backends: {dot: [cuda]}", "flagos, vendor, vendor:NAME and reference"),
        ("- prefer", "it holds no mapping"),
        ("prefer: [", "it is no YAML"),
        (None, "No such file"),
    ],
)
def test_a_wrong_file_is_an_error_of_one_line(tmp_path: Path, text: str | None, reason: str) -> None:
    path = str(tmp_path / "none.yaml") if text is None else write(tmp_path, text)
    with pytest.raises(ConfigInvalid) as caught:
        policy(FLAGOS_CONFIG=path)
    message = str(caught.value)
    assert "FLAGOS_CONFIG" in message and path in message and reason in message and "\n" not in message


def test_entries_that_nobody_knows_are_said(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    assert policy(FLAGOS_CONFIG=write(tmp_path, "prefered: vendor\n")) == Policy()
    assert "'prefered'" in said.text and "prefer, strict" in said.text


def test_without_rights_of_its_own_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "is_privileged", lambda: True)
    assert policy(FLAGOS_CONFIG=write(tmp_path, WHOLE)) == Policy()


# ---- the master switch ----


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("true", True), (" True ", True), ("0", False), ("false", False), ("", None)]
)
def test_use_flaggems(text: str, value: bool | None) -> None:
    assert environment.uses_flaggems({"USE_FLAGGEMS": text}) is value
    assert policy(USE_FLAGGEMS=text).flaggems is (value is not False)


def test_use_flaggems_with_another_value_is_no(said: pytest.LogCaptureFixture) -> None:
    assert environment.uses_flaggems({"USE_FLAGGEMS": "perhaps"}) is False
    assert "USE_FLAGGEMS is 'perhaps'; it can be 1 or 0" in said.text
