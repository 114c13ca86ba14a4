"""SSH to the nodes: the only door to paramiko on the supervisor's side. `keys` does without it."""
