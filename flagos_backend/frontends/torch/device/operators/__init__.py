"""Operators that are more than the inner operator: copies, views, resizing, attention, cells, refusals."""
