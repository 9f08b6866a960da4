"""Transforms of loop nests for Triton, in the order of loop_pipeline.py."""
