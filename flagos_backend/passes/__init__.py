"""Graph to graph, one pass a file, every result verified in tests. ``pipeline.optimize`` runs them in order."""
