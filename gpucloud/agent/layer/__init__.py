"""The job's Python on a node: an environment on top of the node's own, made once for the same wishes."""
