"""Markets: what can be rented, at which price, and what a job is going to cost on it."""
