"""One attempt on this node: what is wanted of it, how it is started, and the files that tell of it."""
