"""Shape rules of every opcode, one file a family: ``RULES`` of each maps an opcode to its rule. See SPEC.md."""
