"""The vendor's libraries, through ATen's kernels of the device. Chosen by kernels/choice.py."""
