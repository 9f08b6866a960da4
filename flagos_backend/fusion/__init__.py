"""Groups instructions into loop nests. Between passes and codegen: regions in, one kernel for each out."""
