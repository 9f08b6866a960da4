"""The error that ends a subcommand with one line instead of a traceback."""


class CommandFailed(Exception):
    """What is wrong, where, and what to do about it."""

    status = 1


class WrongUsage(CommandFailed):
    """What was asked for does not exist; the message lists what does."""

    status = 2
