"""Transforms of loop nests for the host CPU, in the order of pipelines.py."""
