"""Supervision: what is seen of a job, what to do about it, and what is written down of that; all pure."""
