"""Graph to graph, one pass a file. pipelines.py declares the order for each target, pass_manager.py runs it."""
