"""The error that ends a subcommand with one line instead of a traceback."""


class CommandFailed(Exception):
    """What is wrong, where, and what to do about it."""
