"""Supervising a job: observe, decide, act, and what these need."""
