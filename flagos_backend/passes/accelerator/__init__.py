"""Passes that only accelerators want."""
