"""Library kernels of our own, in Triton. Chosen by kernels/choice.py."""
