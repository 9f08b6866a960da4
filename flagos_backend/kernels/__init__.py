"""Kernels: what computes each instruction. `reference` is plain torch and the oracle of every other set."""
