"""Checkpoints: their keys, their bytes, and which one a restore takes."""
