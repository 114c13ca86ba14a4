"""The tables of the learned policy: what recorded markets show, and the program that finds the best acts."""
