"""Basic operations, one family a file."""
