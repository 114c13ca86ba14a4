"""Loops over Hugging Face's Accelerate: they save beside their training, leave on a notice, go on at the exact batch.

from gpucloud.frameworks.accelerate import resumable

run, loader = resumable(accelerator, model, loader)   # after accelerator.prepare
for epoch in run.epochs(3):
    for batch in loader:
        …                                             # nothing changes: a step is over when the next batch is asked for
run.done()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from accelerate.data_loader import DataLoaderShard
from accelerate.utils import send_to_device, synchronize_rng_states

from gpucloud import resume
from gpucloud.domain.errors import UsageError
from gpucloud.frameworks import Handed, keeps_by_itself


def resumable(
    accelerator: Any, model: Any, loader: Any, *, total_steps: int | None = None
) -> tuple[resume.Run, Prepared]:
    """Return the run of all that the accelerator has prepared or was told of, and the training's loader to use now.

    `model` is what `prepare` returned, which the accelerator itself does not keep, or a list of several. State is put
    back: models, optimizers, schedulers, the scaler, what `register_for_checkpointing` was given. The run's steps are
    those of the optimizers; `run.step(loss=…)` may be called for the loss to be told. Raises UsageError for models that
    are not those, for DeepSpeed, and for a loader that one rank reads for all.
    """
    models = list(model) if isinstance(model, (list, tuple)) else [model]
    known = {id(accelerator.unwrap_model(one)) for one in accelerator._models}
    if {id(accelerator.unwrap_model(one)) for one in models} != known:
        raise UsageError(
            f"the accelerator has prepared {len(known)} models, and resumable was given others",
            hint="give it what accelerator.prepare returned: resumable(accelerator, model, loader), or a list of them",
        )
    if "DEEPSPEED" in str(accelerator.distributed_type):
        raise keeps_by_itself("accelerator.save_state('out'), and in the job file checkpoint: {directory: out}")
    steps = _Steps()
    batches = Prepared(loader, asked=steps.tell)
    run = resume.init(
        model=models,
        optimizer=list(accelerator._optimizers) or None,
        scheduler=[one.scheduler for one in accelerator._schedulers] or None,
        scaler=accelerator.scaler,
        custom=list(accelerator._custom_objects),
        accelerator=_Account(accelerator),
        total_steps=total_steps,
    )
    batches.follow(run)
    steps.drive(run, accelerator._optimizers)
    return run, batches


class Prepared(Handed):
    """A loader that `accelerator.prepare` returned, gone on with by a run: it outside, `run.wrap` inside.

    Its own `for` fetches a batch ahead, to know the last one: what that draws would be in no checkpoint. Here the
    length tells, so that of a stream without one, no batch is called the last.
    """

    def __init__(self, shard: Any, asked: Callable[[], None] = lambda: None) -> None:
        if type(shard) is not DataLoaderShard:
            raise UsageError(
                f"the batches of a {type(shard).__name__} are read by one rank for all, and cannot be continued",
                hint="have each rank read its share: Trainer's accelerator_config={'dispatch_batches': False}, or "
                "Accelerate's DataLoaderConfiguration(dispatch_batches=False)",
            )
        super().__init__(shard.base_dataloader, asked)
        self._shard = shard

    def set_epoch(self, epoch: int) -> None:
        """Have the next `for` be of that epoch, unless the run is there, or further."""
        self.enter(epoch)

    def __getattr__(self, name: str) -> Any:
        if "_shard" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._shard, name)

    def __iter__(self) -> Iterator[Any]:
        """Yield what is left of the epoch, on the rank's device."""
        shard = self._shard
        if self._batches is None:
            yield from shard
            return
        if shard.rng_types is not None:
            synchronize_rng_states(shard.rng_types, shard.synchronized_generator)
        shard.begin()
        try:
            for batch in super().__iter__():
                shard.end_of_dataloader = self.is_last
                yield batch if shard.device is None else send_to_device(batch, shard.device)
        finally:
            shard.end()


class _Steps:
    """Tells the run each step of an optimizer once all that belongs to it is done."""

    def __init__(self) -> None:
        self._run: resume.Run | None = None
        self._stepped = False

    def drive(self, run: resume.Run, optimizers: list[Any]) -> None:
        for one in optimizers:
            one.optimizer.register_step_post_hook(self._has_stepped)
        self._run, self._step, self._epochs, self._done = run, run.step, run.epochs, run.done
        run.step, run.epochs, run.done = self.step, self.epochs, self.done  # type: ignore[method-assign]

    def tell(self) -> None:
        """A batch is asked for: the step before is over."""
        if self._stepped:
            self.step()

    def step(self, *, loss: Any = None) -> None:
        """Say so of a step; not of one that has only gathered gradients."""
        if self._stepped:
            self._stepped = False
            self._step(loss=loss)

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs that are left; what the script does at the end of one belongs to its last step."""
        for epoch in self._epochs(count):
            self.tell()
            yield epoch
        self.tell()

    def done(self) -> None:
        """Commit the final state."""
        self.tell()
        self._done()

    def _has_stepped(self, *_: Any) -> None:
        self._stepped = True


class _Account:
    """Where the accelerator is in gathering gradients, with a state as all else has one."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._accelerator.step = state["step"]
