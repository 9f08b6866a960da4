"""Runs compiled programs: plans of steps, their memory, and the graphs of accelerators. Compiles nothing."""
