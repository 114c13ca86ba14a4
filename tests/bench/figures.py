"""Measured figures as lines that one grep finds: `FIGURE name value limit pass|fail`."""

from __future__ import annotations


def figure(name: str, value: float, limit: float | None = None) -> bool:
    """Print one figure and return whether it keeps its limit; without a limit it is only told."""
    kept = limit is None or value <= limit
    shown = f"{limit:g}" if limit is not None else "-"
    print(f"FIGURE {name} {value:.3f} {shown} {'pass' if kept else 'fail'}", flush=True)
    return kept
