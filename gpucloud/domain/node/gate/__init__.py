"""The gate: whether a machine's GPUs are known good."""
