"""The JAX front end: makes the device flagos known to JAX when a backend is accepted. Entry point group jax_plugins."""

from __future__ import annotations

import os
import threading

from plugin_abi import ending

#: How long the end of Python waits for a thread that is in initialize().
_SECONDS = 120.0


def initialize() -> None:
    """Called by JAX when it looks for devices for the first time. Never raises for a missing or refused backend.

    Python does not end meanwhile: it would unwind a daemon thread that is in here through JAX's C++ code, which from
    Python 3.12 on ends the process. Afterwards the library sees to that (native/callers.h).
    """
    # Registers with threading, which nobody can once Python ends.
    import concurrent.futures.thread  # noqa: F401

    done = threading.Event()
    ending.register(_wait, done, os.getpid())
    try:
        # Imported here: JAX imports this module in every process that has it installed.
        from flagos_backend.frontends.jax.registration import register

        register()
    finally:
        done.set()


def _wait(done: threading.Event, process: int) -> None:
    if os.getpid() == process:  # a forked one has not the thread
        done.wait(_SECONDS)
