"""Programs on accelerators: plans of generated kernels and library kernels, and their replay. Beside plan.py."""
