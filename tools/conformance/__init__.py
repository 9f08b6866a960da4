"""Runs test suites that others wrote against a JAX platform and reports pass rates. See README.md."""
