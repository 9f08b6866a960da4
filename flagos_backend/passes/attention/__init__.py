"""Finds in plain HLO what a library kernel computes whole, and makes it one custom call. Between passes and fusion."""
