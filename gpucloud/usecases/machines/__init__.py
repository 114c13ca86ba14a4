"""Machines: what there is to rent, whether they are healthy, and strays."""
