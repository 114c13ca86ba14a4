"""Nodes: what the cloud lists, what they say, and what makes them fit."""
