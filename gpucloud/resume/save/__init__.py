"""Saving beside the training."""
