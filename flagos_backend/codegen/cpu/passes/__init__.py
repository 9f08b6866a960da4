"""Graph passes whose results only native programs have. Run just before emitter.py."""
