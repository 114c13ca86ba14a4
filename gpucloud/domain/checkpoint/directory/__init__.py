"""Checkpoints of scripts that know nothing of gpucloud: which files in a directory are a whole one, and when."""
