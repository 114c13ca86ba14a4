"""Data sets on this node: fetched once, proven, kept."""
