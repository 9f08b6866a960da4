"""The graph IR: typed, immutable HLO. See SPEC.md for its definition and verifier.py for its rules."""
