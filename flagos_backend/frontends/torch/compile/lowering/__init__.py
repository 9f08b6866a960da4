"""ATen operators to HLO, one module for each family. table.py finds the rule of an operator."""
