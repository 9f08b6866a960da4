"""Transforms of loop nests that every target has."""
