"""How programs over several devices of one machine scale: collectives, training steps, and a process that is lost."""
