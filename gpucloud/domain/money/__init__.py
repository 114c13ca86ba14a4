"""Money: what things cost, what was charged, and their sums."""
