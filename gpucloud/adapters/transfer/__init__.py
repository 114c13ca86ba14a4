"""Files between this machine, nodes and the store."""
