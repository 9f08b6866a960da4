"""Accuracy of elementary functions and sums in units in the last place: flagos, JAX's CPU, and the exact value."""
