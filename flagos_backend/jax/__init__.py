"""The public name of the JAX front end, which is frontends/jax."""

from flagos_backend.frontends.jax import initialize

__all__ = ["initialize"]
