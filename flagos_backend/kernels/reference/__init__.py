"""Reference kernels: every opcode in plain torch with XLA's exact semantics. Families register in registry.py."""
