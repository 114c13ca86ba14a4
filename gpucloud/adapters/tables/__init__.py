"""The tables of the learned policy: what recorded markets show, and the program that finds the best acts."""

from __future__ import annotations

from gpucloud.adapters.tables.program import TableMaker

__all__ = ["TableMaker"]
