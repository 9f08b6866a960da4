"""Passes that only the host CPU wants."""
