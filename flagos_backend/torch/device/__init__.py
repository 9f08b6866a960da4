"""The PyTorch device flagos: unmodified eager programs on it. It begins in registration.py."""
