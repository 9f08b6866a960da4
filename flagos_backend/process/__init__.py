"""What the backend is as a part of somebody's process: torch by its first use, Ctrl-C, threads that compile, progress,
logs, files of this user. Below every pipeline stage; knows none."""
