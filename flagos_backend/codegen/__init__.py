"""Emitters: regions and library calls in, something that runs out."""
