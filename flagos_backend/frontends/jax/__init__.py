"""The JAX front end: makes the device flagos known to JAX when a backend is accepted. Entry point group jax_plugins."""

from __future__ import annotations


def initialize() -> None:
    """Called by JAX when it looks for devices for the first time. Never raises for a missing or refused backend."""
    # Imported here: JAX imports this module in every process that has it installed.
    from flagos_backend.frontends.jax.registration import register

    register()
