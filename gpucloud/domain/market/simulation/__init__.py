"""Replays jobs on recorded markets: the product's policies and the product's books, with a virtual clock."""
