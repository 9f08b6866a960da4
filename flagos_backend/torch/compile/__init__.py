"""Public names about torch.compile(backend="flagos")."""
