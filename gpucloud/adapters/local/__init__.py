"""The embedded cloud: nodes that are real SSH servers on this machine."""
