"""The flagos backend: importer, passes, kernels and runtime behind the plugin ABI."""

__version__ = "0.1.0"
