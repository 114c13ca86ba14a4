"""The driver: a node that supervises its own job whenever nobody else does."""
