"""torch.compile(backend="flagos"): AOTAutograd's graphs to programs of the plugin ABI. It begins in backend.py."""
