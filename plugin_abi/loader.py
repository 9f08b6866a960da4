"""Finds, checks and loads a backend: manifests in, one accepted Backend or reasons out. A refusal never raises.

The whole host side in one call: search, manifest, policy, trial, dlopen, negotiation. Front ends begin here.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from plugin_abi import cabi, dynamic_load, ending, isolation, log
from plugin_abi.cache import cache_folder
from plugin_abi.dynamic_load import Loadable
from plugin_abi.errors import CHOSEN_BY_USER, Refusal, RefusalCode, printable
from plugin_abi.files import OpenFile, kept_from_writers, real_path
from plugin_abi.frameworks import RunningFramework
from plugin_abi.isolation import IsolationMode
from plugin_abi.libraries import Dependency, current_linker, loaded_by_descriptor
from plugin_abi.log import BACKEND_LEVELS, backend_logger, logger
from plugin_abi.manifest import Isolation, Manifest, OptionValue, read_manifest
from plugin_abi.negotiation import PluginInfo, call_entry, judge
from plugin_abi.policy import HOST_ABI, Library, Policy, examine, locate, static_initializers_policy
from plugin_abi.rights import Confinement, SettingError
from plugin_abi.search import DISABLE_VARIABLE, FoundManifest, SearchEnvironment, SearchResult, find_manifests
from plugin_abi.trial import Trial, TrialMode, trial_mode, trial_timeout
from plugin_abi.versions import AbiVersion

DEFAULT_PLATFORM: Final = "flagos"
_Input = TypeVar("_Input")
_Output = TypeVar("_Output")


@dataclass(frozen=True, eq=False)
class Backend:
    """A backend that was accepted and is in the process for good; its table may be called."""

    #: None for a backend that was registered natively.
    manifest: Manifest | None
    info: PluginInfo
    version: AbiVersion
    #: The address of the FlagosApi table, valid until the process ends.
    address: int
    priority: int
    place: str
    #: The table as a cffi pointer.
    api: Any = field(repr=False)

    @property
    def platform(self) -> str:
        return self.info.platform

    @property
    def options(self) -> dict[str, OptionValue]:
        """The manifest's options for context_create, its resource_dir among them; the host's own come after them and
        win."""
        if self.manifest is None:
            return {}
        folder = self.manifest.resource_dir
        return {**dict(self.manifest.options), **({} if folder is None else {"resource_dir": real_path(folder)})}


@dataclass(frozen=True)
class Warned:
    """The line that says of one manifest why it is not used."""

    manifest: str
    code: int
    line: str


@dataclass(frozen=True)
class LoadResult:
    """What a load came to. `standby`: backends of the platform that were outranked and therefore not looked into.
    `warnings`: what users of this process are told, which is each refusal but those that they chose themselves."""

    platform: str
    accepted: Backend | None
    refusals: tuple[Refusal, ...]
    standby: tuple[Manifest, ...] = ()
    searched: SearchResult | None = None
    warnings: tuple[Warned, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """A manifest that the search found, read: what `flagos doctor` lists."""

    found: FoundManifest
    #: None where the file is left out or cannot be read; then `refusal` says why.
    manifest: Manifest | None
    library: Path | None
    refusal: Refusal | None


@dataclass
class _State:
    """What this process has loaded. Libraries stay for good: a backend is never unloaded."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    #: By the real path of the library.
    backends: dict[str, Backend] = field(default_factory=dict)
    #: The same of those that run in processes of their own.
    isolated: dict[str, Backend] = field(default_factory=dict)
    native: list[Backend] = field(default_factory=list)
    results: dict[str, LoadResult] = field(default_factory=dict)
    #: The libraries and the log callback: they must outlive every call.
    libraries: list[Any] = field(default_factory=list)
    log_callback: Any = None
    #: Manifests and codes that this process has warned of.
    warned: set[tuple[str, int]] = field(default_factory=set)


_state = _State()


# ---- Logs of the backend -------------------------------------------------------------------------------------------


def _on_log(_user_data: Any, level: int, message: Any, size: int) -> None:
    text = bytes(cabi.ffi().buffer(message, size)).decode("utf-8", "replace")
    line = printable(text)
    backend_logger.log(BACKEND_LEVELS[min(max(level, 0), len(BACKEND_LEVELS) - 1)], "backend: %s", line)


def _log_callback() -> Any:
    if _state.log_callback is None:
        _state.log_callback = cabi.ffi().callback("FlagosLogCallback", _on_log)
    return _state.log_callback


def _backend_log_level() -> int:
    """The most verbose FLAGOS_LOG_* that the logger would show."""
    return max((n for n, level in enumerate(BACKEND_LEVELS) if backend_logger.isEnabledFor(level)), default=0)


# ---- Loading one library -------------------------------------------------------------------------------------------


def _negotiate(entry: Any, manifest: Manifest | None, priority: int, place: str) -> Backend | Refusal:
    """Call an entry and judge what it answers."""
    ffi = cabi.ffi()
    answer, api = call_entry(ffi, entry, HOST_ABI, _log_callback(), _backend_log_level())
    refusal = judge(answer, manifest, HOST_ABI, place)
    if refusal is not None:
        return refusal
    # An interpreter that has ended can take no more lines; a second negotiation without a callback says so.
    ending.register(call_entry, ffi, entry, HOST_ABI, ffi.NULL, 0)
    address = int(ffi.cast("uintptr_t", api))
    return Backend(manifest, answer.plugin_info, answer.version, address, priority, place, api)


def _descriptor(dependency: Dependency) -> int:
    assert dependency.elf is not None and isinstance(dependency.elf.file, OpenFile)
    return dependency.elf.file.descriptor


def _open(library: Library, manifest: Manifest) -> Backend | Refusal:
    """dlopen a library that passed every check, for good, and negotiate with it."""
    path = library.file.place
    first = [d for d in library.dependencies.first if d.elf is not None]
    loads = [Loadable(d.name, str(d.path), _descriptor(d)) for d in first]
    try:
        with kept_from_writers(library.files):
            changed = library.refuse_change()
            if changed is not None:
                return changed
            handle = dynamic_load.load(Loadable(path, path, library.file.descriptor), loads)
        address = ctypes.cast(handle.flagos_plugin_entry, ctypes.c_void_p).value or 0
    except (OSError, AttributeError) as error:
        fact = "the dynamic linker does not load it"
        return Refusal(RefusalCode.DLOPEN_FAILED, fact, path, "correct what the cause names", str(error), error)
    loaded_by_descriptor.update(Path(real_path(d.path)) for d in first)
    # The descriptors stay open: what /proc/self/fd/N means must not become another file.
    _state.libraries.append((handle, library))
    ffi = cabi.ffi()
    return _negotiate(ffi.cast("FlagosPluginEntry", address), manifest, manifest.priority, path)


@dataclass(frozen=True)
class _Session:
    """One load: what it depends on besides the manifests."""

    policy: Policy
    trial: Trial
    #: None where FLAGOS_ISOLATION says what nobody knows.
    isolation: IsolationMode | None
    variables: Mapping[str, str]
    #: Whether this process has rights that its user has not.
    privileged: bool

    @classmethod
    def begin(cls, environment: SearchEnvironment, frameworks: Iterable[RunningFramework]) -> _Session:
        variables = environment.variables
        policy = Policy(
            linker=current_linker(),
            static_initializers=static_initializers_policy(variables),
            frameworks=tuple(frameworks),
        )
        folder = cache_folder(variables, environment.privileged)
        trial = Trial(trial_mode(variables), trial_timeout(variables), folder)
        return cls(policy, trial, isolation.isolation_mode(variables), variables, environment.privileged)

    def without_loading(self) -> _Session:
        """The same where the library will not enter this process: then only a trial can tell what its entry answers."""
        mode = TrialMode.AUTO if self.trial.mode is TrialMode.NEVER else self.trial.mode
        return replace(self, trial=replace(self.trial, mode=mode))

    def within_own_process(self) -> _Session:
        """The same in a process that is the backend's alone: loading the library there is its trial."""
        return replace(self, trial=replace(self.trial, mode=TrialMode.NEVER), isolation=IsolationMode.NONE)

    def check(self, manifest: Manifest) -> Library | Refusal:
        """Everything that can be known without the library's code in this process."""
        return _guarded(manifest.path, self._check, manifest)

    def _check(self, manifest: Manifest) -> Library | Refusal:
        library = examine(manifest, self.policy)
        if isinstance(library, Refusal):
            return library
        try:
            confined = self._confinement(library, manifest)
        except SettingError as error:
            return Refusal(
                RefusalCode.ISOLATION_UNAVAILABLE, error.fact, str(library.path), error.cure, exception=error
            )
        return self.trial.judge(library, manifest, self.policy.abi, confined) or library

    def _is_isolated(self, manifest: Manifest) -> bool:
        asked = self.isolation is IsolationMode.AUTO and manifest.isolation is Isolation.PROCESS
        return asked or self.isolation is IsolationMode.PROCESS

    def _confinement(self, library: Library, manifest: Manifest) -> Confinement | None:
        """How a trial of the library is confined: as its own process is, where it has one. Raises SettingError."""
        if not self._is_isolated(manifest):
            return None
        return isolation.confinement(library, manifest, self.variables, self.privileged)

    def load(self, manifest: Manifest) -> Backend | Refusal:
        return _guarded(manifest.path, self._load, manifest)

    def _load(self, manifest: Manifest) -> Backend | Refusal:
        if self.isolation is None:
            return isolation.unknown_mode(str(manifest.path), self.variables[isolation.MODE_VARIABLE])
        if self._is_isolated(manifest):
            return self._load_isolated(manifest)
        library = self._check(manifest)
        if isinstance(library, Refusal):
            return library
        real = library.file.place
        known = _state.backends.get(real)
        if known is not None:
            return known
        backend = _open(library, manifest)
        if isinstance(backend, Backend):
            _state.backends[real] = backend
        return backend

    def _load_isolated(self, manifest: Manifest) -> Backend | Refusal:
        """The library's code stays out of this process, so that it needs no trial. Its own process makes all checks
        again of the files that it opens; those here give their reasons before one is started."""
        library = examine(manifest, self.policy)
        if isinstance(library, Refusal):
            return library
        place = library.file.place
        known = _state.isolated.get(place)
        if known is not None:
            return known
        address = isolation.entry(library, manifest, self.variables, self.trial.timeout, self.privileged)
        if isinstance(address, Refusal):
            return address
        entry = cabi.ffi().cast("FlagosPluginEntry", address)
        backend = _negotiate(entry, manifest, manifest.priority, place)
        if isinstance(backend, Backend):
            _state.isolated[place] = backend
        return backend


def _guarded(place: Path, judge: Callable[[_Input], _Output | Refusal], given: _Input) -> _Output | Refusal:
    """Whatever goes wrong over one manifest is that manifest's refusal: no file, and no fault of a check, takes the
    device from the others."""
    try:
        return judge(given)
    except Exception as error:
        fact = f"a check of it failed with {type(error).__name__}"
        cure = "correct what the cause names, or remove the manifest"
        return Refusal(RefusalCode.CHECK_FAILED, fact, str(place), cure, str(error), error)


# ---- Choosing among several ----------------------------------------------------------------------------------------


def _read(found: FoundManifest, session: _Session, seen: dict[str, Path]) -> Candidate:
    """Read one found manifest; one whose library an earlier manifest has already named is refused."""
    if found.refusal is not None:
        return Candidate(found, None, None, found.refusal)
    manifest = _guarded(found.path, read_manifest, found.path)
    if isinstance(manifest, Refusal):
        return Candidate(found, None, None, manifest)
    if manifest.unknown_fields:
        logger.info("%s", unknown_fields_message(manifest))
    library = _guarded(found.path, lambda of: locate(of, session.policy.linker), manifest)
    if isinstance(library, Refusal):
        return Candidate(found, manifest, None, library)
    real = real_path(library)
    if real in seen:
        fact = f"its library {real} already belongs to the manifest {seen[real]}"
        cure = "remove one of the two manifests"
        refusal = Refusal(RefusalCode.DUPLICATE_LIBRARY, fact, str(found.path), cure)
        return Candidate(found, manifest, library, refusal)
    seen[real] = found.path
    return Candidate(found, manifest, library, None)


def unknown_fields_message(manifest: Manifest) -> str:
    """What to tell who wrote fields into a manifest that nobody reads."""
    return printable(f"manifest {manifest.path}: nobody reads {', '.join(manifest.unknown_fields)}")


def _candidates(environment: SearchEnvironment, session: _Session) -> tuple[SearchResult, tuple[Candidate, ...]]:
    searched = find_manifests(environment)
    seen: dict[str, Path] = {}
    return searched, tuple(_read(found, session, seen) for found in searched.manifests)


def warn(warnings: Iterable[Warned]) -> None:
    """Write the lines of refused manifests, each once in a process, however many front ends load."""
    for warning in warnings:
        key = warning.manifest, warning.code
        write = logger.debug if key in _state.warned else logger.warning
        _state.warned.add(key)
        write("%s", warning.line)


def _report(refusal: Refusal, manifest: Path) -> tuple[Warned, ...]:
    line = printable(f"manifest {manifest} is not used: {refusal}")
    if refusal.code in CHOSEN_BY_USER:
        logger.info("%s", line)
        return ()
    warned = Warned(str(manifest), int(refusal.code), line)
    warn((warned,))
    return (warned,)


def _choose(platform: str, candidates: tuple[Candidate, ...], session: _Session, searched: SearchResult) -> LoadResult:
    """The first backend that is accepted, by priority and then by the order of the search."""
    refusals: list[Refusal] = []
    warnings: list[Warned] = []

    def refuse(refusal: Refusal, manifest: Path) -> None:
        refusals.append(refusal)
        warnings.extend(_report(refusal, manifest))

    usable: list[tuple[int, Backend | Manifest]] = [
        (backend.priority, backend) for backend in _state.native if backend.platform == platform
    ]
    for candidate in candidates:
        manifest = candidate.manifest
        if manifest is not None and manifest.platform != platform:
            logger.info("manifest %s is for the platform %s, not %s", manifest.path, manifest.platform, platform)
        elif candidate.refusal is not None:
            refuse(candidate.refusal, candidate.found.path)
        elif manifest is not None:
            usable.append((manifest.priority, manifest))
    # Sorting is stable: equal priorities keep the order of the search.
    usable.sort(key=lambda item: -item[0])
    for index, (_, choice) in enumerate(usable):
        loaded = choice if isinstance(choice, Backend) else session.load(choice)
        if isinstance(loaded, Backend):
            logger.info("the platform %s is served by %s (ABI %s)", platform, loaded.place, loaded.version)
            standby = tuple(rest for _, rest in usable[index + 1 :] if isinstance(rest, Manifest))
            return LoadResult(platform, loaded, tuple(refusals), standby, searched, tuple(warnings))
        assert isinstance(choice, Manifest)
        refuse(loaded, choice.path)
    return LoadResult(platform, None, tuple(refusals), (), searched, tuple(warnings))


# ---- What front ends and tools call --------------------------------------------------------------------------------


def load(
    platform: str = DEFAULT_PLATFORM,
    frameworks: Iterable[RunningFramework] = (),
    environment: SearchEnvironment | None = None,
) -> LoadResult:
    """Find a backend for a platform and load it, once and for good.

    `frameworks` are the facts that the caller knows of the frameworks it serves; of others that a manifest names, the
    installed package's files are read. `environment` replaces the process's variables and folders.

    Never raises for what manifests and libraries contain: a backend that is not used is a Refusal in the result, with
    one WARNING line a process on the logger "flagos.loader". A library that was accepted before is not loaded again.
    """
    environment = environment or SearchEnvironment.current()
    with _state.lock:
        log.configure(environment.variables)
        session = _Session.begin(environment, frameworks)
        searched, candidates = _candidates(environment, session)
        result = _choose(platform, candidates, session, searched)
        _state.results[platform] = result
        return result


def load_manifest(manifest_path: Path) -> Backend | Refusal:
    """Load the backend of one manifest into this process, for good: what a backend's own process does."""
    environment = SearchEnvironment.current()
    with _state.lock:
        log.configure(environment.variables)
        manifest = _guarded(manifest_path, read_manifest, manifest_path)
        if isinstance(manifest, Refusal):
            return manifest
        session = _Session.begin(environment, ()).within_own_process()
        return session.load(manifest)


def register_native(entry_address: int, priority: int = 0, place: str = "this process") -> Backend | Refusal:
    """Register a backend that is built into the process: the address of a FlagosPluginEntry, no file, no manifest.

    The entry is negotiated with like that of a library, in this process. load() then considers the backend beside
    those of the manifests; among equal priorities it comes first.
    """
    with _state.lock:
        entry = cabi.ffi().cast("FlagosPluginEntry", entry_address)
        backend = _negotiate(entry, None, priority, place)
        if isinstance(backend, Refusal):
            logger.warning("%s", printable(f"native backend is not used: {backend}"))
        else:
            _state.native.append(backend)
        return backend


def check(
    manifest_path: Path,
    frameworks: Iterable[RunningFramework] = (),
    environment: SearchEnvironment | None = None,
) -> Refusal | None:
    """Why a manifest would be refused; None where it would be accepted. The library never enters this process: it is
    tried in a child, also where FLAGOS_TRIAL_LOAD leaves that out for loads."""
    environment = environment or SearchEnvironment.current()
    log.configure(environment.variables)
    manifest = _guarded(manifest_path, read_manifest, manifest_path)
    if isinstance(manifest, Refusal):
        return manifest
    outcome = _Session.begin(environment, frameworks).without_loading().check(manifest)
    return outcome if isinstance(outcome, Refusal) else None


def search(environment: SearchEnvironment | None = None) -> tuple[SearchResult, tuple[Candidate, ...]]:
    """The places that a load would look at and every manifest in them, read but not checked further."""
    environment = environment or SearchEnvironment.current()
    log.configure(environment.variables)
    return _candidates(environment, _Session.begin(environment, ()))


def last_result(platform: str = DEFAULT_PLATFORM) -> LoadResult | None:
    """What the last load() for a platform came to; None before the first."""
    return _state.results.get(platform)


def no_such_device_message(platform: str = DEFAULT_PLATFORM) -> str:
    """What to tell a program that names a device which no accepted backend serves: the fact, the reasons, the cure."""
    result = last_result(platform)
    if result is None:
        return f"no such device {platform}. Its backends were not looked for yet. Cure: call plugin_abi.loader.load()."
    if result.refusals:
        reasons = " ".join(f"[{number}] {refusal}" for number, refusal in enumerate(result.refusals, 1))
        return f"no such device {platform}. Every backend that was found is refused: {reasons}"
    looked = ", ".join(str(place.path) for place in result.searched.places) if result.searched else "nowhere"
    return (
        f"no such device {platform}. No manifest for it was found; looked in {looked}. "
        f"Cure: install a backend for {platform}, or name its manifest in FLAGOS_DRIVER_FILES."
    )


def no_device_message(backend: Backend, error: object) -> str:
    """What to tell a program where a backend was accepted and then could not give a device: the fact and the cure."""
    cure = "correct the cause"
    if backend.manifest is not None:
        cure += f", or set {DISABLE_VARIABLE}={backend.manifest.path.name} to use another backend"
    return f"no such device {backend.platform}. {backend.place} offers none: {str(error).rstrip('.')}. Cure: {cure}."
