"""Cells of exact resume whose training loop is a framework's: two ranks each, killed or noticed."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.prove.cells import PLAIN, Device
from tests.prove.disturbing import Matrix
from tests.standins.framework_training import FRAMEWORKS, main
from tests.standins.saved_runs import SavedRun

PIPELINE = "pipeline"  # torch's own
SETTINGS = {
    "huggingface": (PLAIN, "accumulation+evaluation", "workers+collation", "stream"),
    "accelerate": (PLAIN, "accumulation", "workers+collation"),
    "dcp": (PLAIN, "stateful", "ddp"),
    "lightning": (PLAIN, "evaluation+steps", "accumulation+evaluation+often", "workers+collation"),
    PIPELINE: (PLAIN, "module+1f1b", "interleaved+loader"),
}
"""What the script of each framework is made of beside its model."""

EVENTS = ("kill", "notice")
_RANKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkCell:
    """One framework's training, and how it is disturbed; as `Cell` is to the matrix."""

    framework: str
    settings: tuple[str, ...]
    event: str
    loader: str = "framework"
    before: int = _RANKS
    after: int = _RANKS

    @classmethod
    def read(cls, name: str) -> FrameworkCell:
        """Return the cell of that name. ValueError for one that there is not."""
        for cell in every():
            if str(cell) == name:
                return cell
        raise ValueError(f"{name} is no cell: one of {', '.join(map(str, every()))}")

    def __str__(self) -> str:
        return ".".join((self.framework, "+".join(self.settings) or PLAIN, self.event))

    @property
    def training(self) -> str:
        """What is trained, and how, whatever befalls it."""
        return f"{self.framework}.{'+'.join(self.settings)}"

    def promise(self, device: Device) -> str | None:
        """Return the level that its resume must have."""
        return "exact"


def every() -> Iterator[FrameworkCell]:
    """Yield all cells."""
    for framework in FRAMEWORKS:
        for settings, event in itertools.product(SETTINGS[framework], EVENTS):
            chosen = tuple(one for one in settings.split("+") if one != PLAIN)
            yield FrameworkCell(framework=framework, settings=chosen, event=event)


def quick() -> Iterator[FrameworkCell]:
    """Yield one: to import a framework takes as long as to train, and each has tests of two ranks of its own."""
    yield next(every())


class FrameworkMatrix(Matrix):
    """Judges cells of frameworks."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        super().__init__(folder, compiles=False)

    def _run(self, cell: FrameworkCell) -> SavedRun:  # type: ignore[override]
        of = "torch.distributed.pipelining" if cell.framework == PIPELINE else f"gpucloud.frameworks.{cell.framework}"
        importlib.import_module(of)  # here, so that no rank needs to
        self._number += 1
        return SavedRun(
            self._folder / f"{self._number:03}",
            ranks=cell.before,
            steps=12,
            every=2,
            script=main,
            arguments=("--framework", cell.framework, "--settings", *cell.settings),
        )
