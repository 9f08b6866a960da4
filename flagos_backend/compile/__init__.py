"""From a program to what runs: the only room that knows every stage. compiler.py is where to begin."""
