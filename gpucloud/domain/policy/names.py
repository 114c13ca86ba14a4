"""The policies by name: a job names one on machines that never ask it."""

from __future__ import annotations

from enum import Enum


class Policy(str, Enum):
    """How to choose between spot, on demand and waiting."""

    LEARNED = "learned"
    UNIFORM = "uniform"
    GREEDY = "greedy"
    ON_DEMAND = "on_demand"
