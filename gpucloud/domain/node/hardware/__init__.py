"""Machines from inside: GPUs, drivers, disks, and the signs that one is ill."""
