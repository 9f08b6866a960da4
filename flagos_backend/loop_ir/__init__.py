"""The IR of loop nests, of which a fused region is one: iteration space, affine index maps, expressions, reductions."""
