"""The live display on a terminal: the story scrolls, and a panel beneath shows where the job stands."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gpucloud.cli.render.bills import money_line
from gpucloud.cli.render.onlookers import PanelState, pace_words, panel_state
from gpucloud.cli.render.output import FirstRank
from gpucloud.cli.render.use import Rows, headline, use_rows
from gpucloud.cli.render.words import folded, with_short_ids
from gpucloud.domain.money.budget import Spend
from gpucloud.domain.node.output import without_code_folder
from gpucloud.domain.node.status import UNTOLD
from gpucloud.domain.supervision.action import Action
from gpucloud.domain.supervision.snapshot import Limits, Snapshot
from gpucloud.domain.untrusted import coloured, in_one_line, lines_of, set_off
from gpucloud.usecases.jobstore.condition import Saves, in_short
from gpucloud.usecases.jobstore.report import JobReport

_HELD = 1000
"""Lines that are held back at the most, the newest."""
_ECHO = 3
"""Columns that stay free behind the panel: a terminal writes ^C there, which must not begin another line."""
_BAR, _GAP = 24, 2
_FRAME = 4
"""The panel's two edges with the blanks inside them."""
_MOST_BARS = 4
_STORY = " " * len("12:34:56 ")
_LIMITS = Limits()
"""What a line of the story goes on behind."""


class LiveOnlooker:
    """Story lines above, a panel below, on standard error."""

    def __init__(self, limits: Limits = _LIMITS, saves: Saves | None = None) -> None:
        self._limits, self._saves = limits, saves
        self._console = Console(stderr=True, highlight=False)
        self._live = self._new()
        self._held: list[Text] | None = None
        """What is said while the user is asked something; None while nobody is."""
        self._output = FirstRank()
        self._now: PanelState | None = None

    def __enter__(self) -> LiveOnlooker:
        """Take the last lines of the terminal."""
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Give the terminal back as it was, the story stays."""
        self._write(self._output.end())
        self._live.stop()

    def pause(self) -> None:
        """Take the panel away, and hold back what is said: a question is not written into."""
        self._live.stop()
        self._held = []

    def go_on(self) -> None:
        """Say what was held back, and show the panel again."""
        held, self._held = self._held or [], None
        for line in held:
            self._console.print(line)
        self._live = self._new()  # one that was stopped would first erase as many lines as it had, of those above
        self._live.start()

    def story(self, line: str) -> None:
        """Print the line above the panel."""
        lines = set_off(f"{datetime.now(timezone.utc):%H:%M:%S} {line}").split("\n")
        first, *rest = "\n".join(folded(one, self._console.width, _STORY) for one in lines).split("\n")
        time, told = first[: len(_STORY)], first[len(_STORY) :]
        self._print(Text(time, style="dim") + Text("\n".join([told, *rest])))

    def tick(self, snapshot: Snapshot, action: Action, spend: Spend) -> None:
        """Draw the panel anew."""
        self._now = panel_state(snapshot, action, spend, self._limits, self._saves)
        self._draw()

    def output(self, attempt: int, rank: int, text: str) -> None:
        """Print rank 0's lines above the panel, and what moves in it."""
        if rank == 0:
            self._write(self._output.feed(attempt, text))
            self._draw()

    def _write(self, text: str) -> None:
        for line in without_code_folder(text).splitlines():
            self._print(Text("  | ", style="dim") + Text.from_ansi(coloured(line)))

    def _draw(self) -> None:
        if self._now is not None:
            self._live.update(_panel(self._now, self._output.moving, self._console.width - _ECHO))

    def _new(self) -> Live:
        return Live(console=self._console, refresh_per_second=8, transient=True)

    def _print(self, line: Text) -> None:
        if self._held is None:
            self._console.print(line)
        else:
            self._held = [*self._held[1 - _HELD :], line]


class LiveUse:
    """The table of `watch`: it stays on the terminal as it was last."""

    def __init__(self) -> None:
        self._live = Live(console=Console(highlight=False), auto_refresh=False)

    def __enter__(self) -> LiveUse:
        """Take the last lines of the terminal."""
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the last table where it is."""
        self._live.stop()

    def show(self, report: JobReport) -> None:
        """Draw the table anew."""
        rows = use_rows(report)
        body = use_grid(rows, self._live.console.width - _FRAME) if rows[1:] else Text(_nobody(report), style="dim")
        said = Text("\n".join(lines_of(headline(report))))
        shown = Panel(Group(said, Text(""), body), title=report.job, title_align="left")
        self._live.update(shown, refresh=True)


def use_grid(rows: Rows, width: int) -> Table:
    """Return machines and GPUs as a table for so much room: a column that says nothing goes, and remarks take lines."""
    cells = [[in_one_line(cell) for cell in row] for row in rows]
    told = [at for at, column in enumerate(zip(*cells[1:], strict=True)) if set(column) - {"", "-"}]
    cells = [[row[at] for at in told] for row in cells]
    if sum(max(map(len, column)) + _GAP for column in zip(*cells, strict=True)) > width:
        head, *others = with_short_ids(cells)
        cells = [["temp" if word == "temperature" else word for word in head], *others]
    grid = Table(box=None, header_style="dim", padding=(0, _GAP, 0, 0))
    for word in cells[0]:
        is_last = word == rows[0][-1]
        grid.add_column(word, no_wrap=not is_last, overflow="fold" if is_last else "ellipsis")
    for row, whole in zip(cells[1:], rows[1:], strict=True):
        grid.add_row(*(Text(cell, style=_style(whole)) for cell in row))
    return grid


def _style(row: tuple[str, ...]) -> str:
    if row[1].startswith(("UNHEALTHY", "does not")):
        return "red"
    # At full power the cap holds the clocks down: that is healthy.
    return "yellow" if row[1].startswith("GPU") and row[-1] not in ("", "sw power cap") else ""


def _nobody(report: JobReport) -> str:
    if report.status.ended:
        return "no machine was asked: the job has ended"
    return (
        f"no machine was asked: {'no attempt is open' if report.open_attempt is None else 'none of its attempt is up'}"
    )


def _panel(now: PanelState, moving: tuple[str, ...], width: int) -> Panel:
    title = f"{now.job} · attempt {now.attempt}" if now.attempt else now.job
    bars = [Text(in_one_line(row), style="dim", no_wrap=True, overflow="ellipsis") for row in moving[:_MOST_BARS]]
    shown = Group(_progress(now, width - _FRAME), *bars, _money(now, width - _FRAME), _nodes(now))
    return Panel(shown, title=title, title_align="left", width=width)


def _progress(now: PanelState, width: int) -> Table:
    """Return one line; where there is no room for all of it, the bar goes first, then what is right of it."""
    told = [Text(in_one_line(now.phase), style="bold")]
    if now.step is not None and now.phase != UNTOLD:
        told.append(Text(now.reached))
    if now.told_at is not None:
        told.append(Text(f"as of {now.told_at:%H:%M:%S} UTC", style="red"))
    to_go = [Text(word) for word in pace_words(now)]
    told += to_go if _width([*told, *to_go]) <= width else to_go[-1:]  # of both, what ends first matters
    if now.saved is not None:
        told.append(Text(now.saved, style="green"))
    elif now.unsaved is not None:
        told.append(Text(in_short(now.unsaved), style="yellow"))
    if now.loss is not None:
        told.append(Text(f"loss {now.loss:.4f}"))
    told += map(Text, now.printed)
    while len(told) > 1 and _width(told) > width:
        told.pop()
    cells: list[Text | ProgressBar] = [*told]
    if now.step is not None and now.total_steps and _width(told) + _BAR + _GAP <= width:
        cells.insert(
            min(3 if now.told_at else 2, len(cells)), ProgressBar(total=now.total_steps, completed=now.step, width=_BAR)
        )
    row = _uncut(len(cells))
    row.add_row(*cells)
    return row


def _width(cells: Sequence[Text]) -> int:
    return sum(cell.cell_len for cell in cells) + _GAP * (len(cells) - 1)


def _uncut(columns: int) -> Table:
    """Return a grid whose lines are cut at the terminal's edge, and never take two."""
    grid = Table.grid(padding=(0, _GAP, 0, 0))
    for _ in range(columns):
        grid.add_column(no_wrap=True, overflow="ellipsis")
    return grid


def _money(now: PanelState, width: int) -> Text:
    said = "spent "
    return Text(said + money_line(now.spend, width - len(said)), no_wrap=True, overflow="ellipsis")


def _nodes(now: PanelState) -> Table:
    rows = _uncut(4)
    for node in now.nodes:
        rows.add_row(*(Text(in_one_line(cell)) for cell in (node.node_id, node.zone, node.word, node.gpus)))
    return rows
