"""Loops in torchtitan's way, whose parts have a state each: they save beside their training, leave on a notice, go on
at the exact batch.

    from gpucloud.frameworks.dcp import Checkpointer      # in place of torchtitan's CheckpointManager, or of dcp.save

    self.checkpointer = Checkpointer(
        dataloader=dataloader, model_parts=[model], optimizers=optimizers, lr_schedulers=schedulers,
        states={"train_state": self},
    )
    self.checkpointer.load()
    self.dataloader = self.checkpointer.dataloader
    …
        self.checkpointer.save(self.step, last_step=self.step == steps)   # at the end of each step, as ever
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gpucloud import resume
from gpucloud.domain.errors import UsageError
from gpucloud.frameworks import Handed


class Checkpointer:
    """Has a run save, and lets it decide when; `dataloader` is what the training takes its batches from, once loaded.

    `model_parts`, `optimizers` and `lr_schedulers` are lists, or torchtitan's containers of such; each of `states` has
    `state_dict()` and `load_state_dict()`. Ranks may hold tensors together (`fully_shard`, tensor parallelism).
    """

    def __init__(  # noqa: PLR0913  those of torchtitan, and two of the run
        self,
        *,
        model_parts: Sequence[Any],
        optimizers: Any,
        dataloader: Any,
        lr_schedulers: Any = (),
        states: Mapping[str, Any] | None = None,
        total_steps: int | None = None,
        seed: int = 0,
    ) -> None:
        self.dataloader = Handed(dataloader)
        self.run: resume.Run | None = None
        self._parts = {
            "model": list(model_parts),
            "optimizer": list(getattr(optimizers, "optimizers", optimizers)) or None,
            "scheduler": list(getattr(lr_schedulers, "schedulers", lr_schedulers)) or None,
            **{name: _Done(one) if _is_of_the_script(one) else one for name, one in (states or {}).items()},
        }
        self._states = [state for state in self._parts.values() if isinstance(state, _Done)]
        self._total_steps, self._seed = total_steps, seed

    def load(self) -> bool:
        """Put the newest checkpoint back, on every rank, once all is made and sharded; return whether there was one."""
        if self.run is not None:
            raise UsageError("this checkpointer has loaded already", hint="call checkpointer.load() once")
        self.run = resume.init(**self._parts, total_steps=self._total_steps, seed=self._seed)
        self.dataloader.follow(self.run)
        return self.run.steps_done > 0

    def save(self, curr_step: int, last_step: bool = False, *, loss: Any = None) -> None:  # noqa: FBT001, FBT002
        """Say that a step is done, the last one if that is so: saves when it is due, leaves on a notice.

        Raises UsageError for a step that is not the next one: then no state has the script's count of them.
        """
        if self.run is None:
            raise UsageError("nothing was loaded before the first step", hint="call checkpointer.load() first")
        if curr_step != self.run.steps_done + 1:
            raise UsageError(
                f"this is step {curr_step}, and the run has done {self.run.steps_done}",
                hint='count steps where a resume puts them back: states={"train_state": …}, and save() once a step',
            )
        for state in self._states:
            state.done()
        self.run.step(loss=loss)
        if last_step and self.run.steps_done == curr_step:
            self.run.done()

    def close(self) -> None:
        """Nothing is left to be closed: the last step ended the run."""


_SMALL = 4096
"""Numbers in a tensor of which a copy costs nothing at every step. A larger one, as of averaged weights, is taken to
change in a step alone, and not ahead of its batch."""


_OF_A_STEP = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
"""What a run knows how to save, and when; no loop changes it ahead of a batch."""


def _is_of_the_script(state: Any) -> bool:
    if isinstance(state, _OF_A_STEP) or hasattr(state, "last_epoch"):  # as schedules of any kind have
        return False
    return hasattr(state, "state_dict") and hasattr(state, "load_state_dict")


class _Done:
    """A state as the last step left it: loops count a step ahead of its batch, for which they may wait in vain."""

    def __init__(self, of: Any) -> None:
        self._of = of
        self._last: Any = None

    def state_dict(self) -> Any:
        """Return the state after the last step, or of now before the first."""
        return self._of.state_dict() if self._last is None else self._last

    def load_state_dict(self, state: Any) -> None:
        """Put it back, and take what came of that for what the last step left."""
        self._of.load_state_dict(state)
        self.done()

    def done(self) -> None:
        """A step is done."""
        self._last = _kept(self._of.state_dict())


def _kept(value: Any) -> Any:
    """Return the value without what changes in place: all is copied but large tensors."""
    if isinstance(value, dict):
        return {key: _kept(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        found = [_kept(one) for one in value]
        return found if isinstance(value, list) else tuple(found)
    if isinstance(value, torch.Tensor):
        return value.clone() if value.numel() <= _SMALL else value
    return copy.deepcopy(value)
