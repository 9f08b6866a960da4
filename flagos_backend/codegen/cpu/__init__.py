"""The emitter for the host CPU: loop nests and library calls in, a native program out. emitter.py is where to begin."""
