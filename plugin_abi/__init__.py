"""The host side of the plugin ABI: manifests, policy, loader. Imports neither frameworks nor the backend."""

__version__ = "0.1.0"
