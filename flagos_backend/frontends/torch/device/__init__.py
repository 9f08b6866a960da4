"""The PyTorch device flagos: unmodified eager programs on it. It begins in registration.py."""

# First of all: PyTorch's import ends with that of this package, and finds no module of it half imported then.
import torch as torch
