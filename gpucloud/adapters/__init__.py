"""Ports made real: one module for each third party."""
