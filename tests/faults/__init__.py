"""Faults from outside: a process struck at the n-th call that it makes, with nothing of it in the product."""
