"""What runs on a node: keeps the node at the level that the supervisor wants; standard library only."""
