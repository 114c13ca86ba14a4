"""What a trial of resuming wants to know of the script's steps."""

from __future__ import annotations

from typing import Any

import torch

from gpucloud.domain.trial import LOSSES, Trial


class Trying:
    """The loss of every step so far, which is saved and put back with the rest; nothing outside trials."""

    def __init__(self, trial: Trial | None) -> None:
        self._on = trial is not None
        self._losses: list[float | None] = []

    def stepped(self, loss: Any) -> None:
        """A step was done; for a loss on a GPU this waits, as nobody measures a trial."""
        if self._on:
            loss = loss.detach() if isinstance(loss, torch.Tensor) else loss
            self._losses.append(None if loss is None else float(loss))

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it."""
        return {LOSSES: list(self._losses)} if self._on else {}

    def put_back(self, own: dict[str, Any]) -> None:
        """Go on from what a checkpoint holds."""
        self._losses = list(own.get(LOSSES, []))
