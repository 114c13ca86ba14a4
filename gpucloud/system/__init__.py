"""The machine that this runs on: its processes and locks, its files, its clock, its GPUs. Standard library only."""
