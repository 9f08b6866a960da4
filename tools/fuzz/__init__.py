"""Differential fuzzer: random HLO programs on flagos and on stock XLA's CPU. See README.md."""
