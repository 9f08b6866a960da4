"""Custom calls of our own: what they compute, as typed attributes."""
