"""A simulation of the whole loop: real decisions, simulated machines, networks, clocks and supervisors."""
