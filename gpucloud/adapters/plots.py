"""Draws charts into a file with matplotlib, which the extra `plots` brings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gpucloud.domain.errors import UsageError
from gpucloud.ports import Chart

_FORMATS = (".png", ".svg")
_PANEL_INCHES = (4.6, 3.4)
_FEW = 20  # points that are marked one by one
# Okabe and Ito's: people who see colours differently tell them apart, on dark paper too.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


class Plot:
    """A file that charts can be drawn into. UsageError for one that is neither PNG nor SVG, or in no folder."""

    def __init__(self, path: Path) -> None:
        if path.suffix.lower() not in _FORMATS:
            raise UsageError(f"{path} names no format that is drawn here", hint="a name that ends in .png or .svg")
        if not path.parent.is_dir():
            raise UsageError(f"there is no folder {path.parent}", hint=f"mkdir -p {path.parent}")
        self._path = path

    def save(self, charts: Sequence[Chart], *, title: str) -> None:
        """Draw the charts in a square, with one scale upwards for all. UsageError if the file cannot be written."""
        across = math.ceil(math.sqrt(len(charts)))
        down = -(-len(charts) // across)
        # The same charts give the same file: SVG's ids come from this salt, and no date is written.
        with mpl.rc_context({"svg.hashsalt": "gpucloud", "font.size": 9}):
            figure = Figure(figsize=(across * _PANEL_INCHES[0], down * _PANEL_INCHES[1]), layout="constrained")
            figure.suptitle(title)
            panels = list(figure.subplots(down, across, sharey=True, squeeze=False).flat)
            for panel, chart in zip(panels, charts, strict=False):
                _draw(panel, chart)
            for unused in panels[len(charts) :]:
                unused.set_visible(False)
            try:
                figure.savefig(self._path, dpi=150, metadata={"Date": None} if self._is_svg else {})
            except OSError as error:
                raise UsageError(f"{self._path} cannot be written: {error.strerror}") from error

    @property
    def _is_svg(self) -> bool:
        return self._path.suffix.lower() == ".svg"


def _draw(panel: Axes, chart: Chart) -> None:
    for series, colour in zip(chart.series, itertools.cycle(_COLOURS), strict=False):
        xs, ys = zip(*series.points, strict=True)
        panel.plot(xs, ys, color=colour, label=series.label, marker="o" if len(xs) < _FEW else "", markersize=3)
        if series.upper:
            panel.fill_between(xs, ys, series.upper, color=colour, alpha=0.12, linewidth=0)
    if chart.limit is not None:
        label, y = chart.limit
        panel.axhline(y, color="0.35", linestyle="--", linewidth=1, label=label)
    panel.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
    panel.set_ylim(bottom=0)
    panel.tick_params(labelleft=True)
    panel.grid(visible=True, alpha=0.25)
    panel.legend(fontsize=8, frameon=False)
