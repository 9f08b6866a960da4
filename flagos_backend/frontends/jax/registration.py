"""What initialize() does: has the loader find a backend, and registers it with JAX when one is accepted.

Without one nothing of JAX changes, but that naming the device gives the reason.
"""

from __future__ import annotations

import importlib.resources
import logging
from typing import Final

from flagos_backend.errors import Interrupted
from flagos_backend.frontends.jax import jax_internals
from plugin_abi import frameworks, loader
from plugin_abi.errors import FlagosStatusError
from plugin_abi.host.api import Api
from plugin_abi.host.context import Context
from plugin_abi.loader import DEFAULT_PLATFORM, Backend

logger = logging.getLogger("flagos.jax")

#: JAX's own: cpu 0, tpu 300, plugins such as cuda 400; the greatest of them becomes the default device.
#: A device that is the host CPU again comes after cpu: nothing changes for a program that does not ask for it.
HOST_PRIORITY: Final = -10
#: An accelerator comes before cpu, and after the accelerators of JAX's own plugins.
ACCELERATOR_PRIORITY: Final = 200
_ADAPTER: Final = "lib/libpjrt_flagos.so"


def register() -> None:
    """Registers the platform with JAX: in full; by name only when no backend is accepted, so that naming it gives the
    reason; not at all when JAX_PLATFORMS leaves it out."""
    requested = jax_internals.requested_platforms()
    if requested and DEFAULT_PLATFORM not in requested:
        logger.debug("JAX_PLATFORMS=%s leaves %s out", ",".join(requested), DEFAULT_PLATFORM)
        return
    if jax_internals.is_registered(DEFAULT_PLATFORM):
        return
    result = loader.load(DEFAULT_PLATFORM, frameworks=running_frameworks())
    if result.accepted is None:
        _register_unavailable(loader.no_such_device_message(DEFAULT_PLATFORM))
        return
    try:
        priority = HOST_PRIORITY if _is_host(result.accepted) else ACCELERATOR_PRIORITY
    except (FlagosStatusError, LookupError) as error:
        reason = loader.no_device_message(result.accepted, error)
        logger.warning("%s", reason)
        _register_unavailable(reason)
        return
    _register_backend(result.accepted, priority)


def running_frameworks() -> tuple[frameworks.RunningFramework, ...]:
    """The JAX of this process, for the manifest's built_with."""
    found = (frameworks.detect(name) for name in ("jax", "jaxlib"))
    return tuple(framework for framework in found if framework is not None)


def _is_host(backend: Backend) -> bool:
    """Whether the backend's first device is the host. Raises LookupError where it has none, FlagosStatusError."""
    with Context(backend) as context:
        devices = context.addressable_devices
        if not devices:
            raise LookupError("it has no device in this process")
        # The memory of a backend in a process of its own is not the host's, also where its device is.
        return devices[0].is_host_memory or devices[0].kind == "cpu"


def _register_unavailable(reason: str) -> None:
    # Why was said, line by line; this says what it means for JAX.
    logger.info("JAX starts without the platform %s", DEFAULT_PLATFORM)
    jax_internals.register_unavailable(DEFAULT_PLATFORM, HOST_PRIORITY, lambda: reason)


def _register_backend(backend: Backend, priority: int) -> None:
    from flagos_backend.frontends.jax import callbacks, dlpack, lowering

    adapter = importlib.resources.files("plugin_abi").joinpath(_ADAPTER)
    jax_internals.register_plugin(DEFAULT_PLATFORM, str(adapter), priority, lambda: client_options(backend))
    lowering.register_rules()
    jax_internals.enable_donation(DEFAULT_PLATFORM)
    jax_internals.raise_interrupts(f"[FLAGOS-{Interrupted.number}]")
    jax_internals.enable_compilation_cache(DEFAULT_PLATFORM)
    jax_internals.enable_python_callbacks(DEFAULT_PLATFORM, callbacks.emit_python_callback)
    dlpack.enable(str(adapter))


def client_options(backend: Backend) -> jax_internals.Options:
    """The PJRT adapter's create options: the addresses that it works with, and the manifest's options."""
    # Imported when JAX makes its client: a process that only looks for devices elsewhere does not need them.
    from flagos_backend.frontends.jax import trampolines

    return {
        **{name: list(value) if isinstance(value, tuple) else value for name, value in backend.options.items()},
        "flagos_api": backend.address,
        "flagos_converter": trampolines.converter_address(),
        "flagos_host_callback": trampolines.host_callback_address(Api(backend)),
    }
