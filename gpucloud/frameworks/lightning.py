"""Lightning's Trainer: saves beside its training, leaves on a notice, goes on at the exact batch.

    from gpucloud.frameworks.lightning import Resumable

    trainer = Trainer(callbacks=[Resumable()], …)
    trainer.fit(module, data)

A step is over for the run when the next batch is asked for, or the next epoch begins: its validation, its schedules and
what other callbacks do are done by then, so that a checkpoint has it all.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.model_helpers import is_overridden

from gpucloud import resume
from gpucloud.domain.errors import UsageError
from gpucloud.frameworks import Handed, keeps_by_itself


class Resumable(Callback):  # type: ignore[misc]  # of a package that mypy does not look into
    """Has `trainer.fit` save, leave and go on as a run of `gpucloud.resume` does; the first of the callbacks.

    Lightning's own checkpoints are not needed for that. It fits once. UsageError is raised for what no run can go on
    with exactly: several training loaders, or one that has no length or is made anew; DeepSpeed.
    """

    def __init__(self) -> None:
        self._trainer: Any = None
        self._account: _Account | None = None
        self._run: resume.Run | None = None
        self._batches: _Loader | None = None
        self._told = 0  # optimizer steps, as Lightning counts them
        self._has_rehearsed = self._is_done = False
        self._loss: Any = None
        self._phase = contextlib.ExitStack()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """See to it that the training's batches come by way of the run."""
        if stage != "fit":
            return
        _require_resumable(trainer)
        if self._trainer is not None:
            raise UsageError(
                "this trainer has fitted already, and its run is over",
                hint="give another Trainer another Resumable(), in a job of its own",
            )
        self._trainer = trainer
        processed = trainer.strategy.process_dataloader

        def process(loader: Any) -> Any:
            made = processed(loader)
            return self._handed(made) if trainer.training else made  # others are for evaluation

        trainer.strategy.process_dataloader = process

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Put the state back: model, optimizers and schedules are there by now."""
        loop = trainer.fit_loop
        loop.setup_data()
        batches = self._batches
        if batches is None or loop.max_batches == float("inf"):
            raise UsageError(
                "nobody knows how many batches an epoch has, and Lightning would fetch one ahead to see the last",
                hint="give the data set a __len__",
            )
        total = trainer.estimated_stepping_batches if pl_module.automatic_optimization else None
        self._account = _Account(trainer)
        run = resume.init(
            model=trainer.strategy.model,
            optimizer=list(trainer.strategy.optimizers) or None,
            scheduler=[config.scheduler for config in trainer.lr_scheduler_configs] or None,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            lightning=self._account,
            total_steps=total if isinstance(total, int) and total > 0 else None,
            seed=int(os.environ.get("PL_GLOBAL_SEED", "0")),
        )
        if is_overridden("on_save_checkpoint", pl_module):
            run.best_effort("what the module's on_save_checkpoint adds is in Lightning's own checkpoints alone")
        batches.follow(run)
        if run.steps_done:
            trainer.num_sanity_val_steps = 0  # as for its own checkpoints: it would change what was put back
            _go_on(loop)
        self._run, self._told = run, trainer.global_step

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Tell the last step of the epoch before, of which all is done now, and go on to this one."""
        self._tell()
        if self._batches is not None:
            self._batches.enter(trainer.current_epoch)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Have DDP group gradients as before a resume."""
        if self._run is not None and self._account is not None and not self._has_rehearsed:
            self._has_rehearsed = True
            with self._account.kept(), _unlogged(pl_module):
                self._run.rehearse(lambda: _passed(trainer, batch, batch_idx))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Remember the loss, for reports."""
        self._loss = outputs.get("loss") if isinstance(outputs, dict) else None

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Say that this is no hang."""
        if self._run is not None and not trainer.sanity_checking:
            self._phase.enter_context(self._run.phase("evaluate"))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Train on."""
        self._phase.close()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Commit the final state: the run is done."""
        self._tell()
        self._end()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """End a run that was over already, for which Lightning trains no more."""
        self._end()

    def _handed(self, loader: Any) -> _Loader:
        if self._batches is not None:
            raise UsageError(
                "a run has one loader, and this training has several",
                hint="join their data sets: torch.utils.data.ConcatDataset, or one that returns a sample of each",
            )
        self._batches = _Loader(loader, asked=self._tell)
        return self._batches

    def _tell(self) -> None:
        """The step before is over, if an optimizer has stepped in it."""
        if self._run is not None and (steps := self._trainer.global_step) != self._told:
            self._told = steps
            self._run.step(loss=self._loss)

    def _end(self) -> None:
        if self._run is not None and not self._is_done:
            self._is_done = True
            self._run.done()


class _Loader(Handed):
    """With a state, of which Lightning wants to know that it is there: the run has it."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take nothing."""


def _require_resumable(trainer: Any) -> None:
    if "DeepSpeed" in type(trainer.strategy).__name__:
        raise keeps_by_itself("let Lightning save, and name its folder in the job file: checkpoint: {directory: out}")
    if trainer.reload_dataloaders_every_n_epochs:
        raise UsageError(
            "reload_dataloaders_every_n_epochs makes the loader anew, and a run has one",
            hint="leave it out, and have the data set change by its set_epoch(epoch)",
        )


def _go_on(loop: Any) -> None:
    """Have Lightning's loops go on after a step of which all is done.

    Its own checkpoints are made in the midst of that, and what it does for them after a restart would be done twice
    here. So the loops count on from where they were, and know of no restart from the first batch on.
    """
    epoch_loop = loop.epoch_loop
    reset = epoch_loop.reset
    is_between = loop.epoch_progress.current.ready == loop.epoch_progress.current.processed

    def once() -> None:
        del epoch_loop.reset
        if is_between:
            epoch_loop._restarting = False  # its counts begin anew
        reset()
        for one in (loop, epoch_loop, epoch_loop.val_loop):
            one._restarting = False
            one.reset_restart_stage()

    epoch_loop.reset = once


def _passed(trainer: Any, batch: Any, batch_idx: int) -> None:
    """Do a step up to its gradients; where the module steps by itself, all of it."""
    loop = trainer.fit_loop.epoch_loop
    arguments = loop._build_kwargs(OrderedDict(), batch, batch_idx)
    if trainer.lightning_module.automatic_optimization:
        loop.automatic_optimization._make_closure(arguments, trainer.optimizers[0], batch_idx)()
    else:
        call._call_strategy_hook(trainer, "training_step", *arguments.values())


@contextlib.contextmanager
def _unlogged(module: Any) -> Iterator[None]:
    """Have nothing come of what the module logs."""
    for name in ("log", "log_dict"):
        object.__setattr__(module, name, lambda *_args, **_named: None)
    try:
        yield
    finally:
        for name in ("log", "log_dict"):
            object.__delattr__(module, name)


class _Account:
    """What Lightning, its callbacks and metrics keep in mind from step to step, with a state as all else has one."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        loops = copy.deepcopy(trainer.fit_loop.state_dict())
        for counts in (loops["epoch_progress"]["total"], loops["epoch_progress"]["current"]):
            counts["ready"] = counts["started"]  # an epoch that is about to begin has not begun
        return {
            "loops": loops,
            "callbacks": call._call_callbacks_state_dict(trainer),
            "data": trainer.datamodule.state_dict() if trainer.datamodule is not None else {},
            "metrics": {name: self._kept_by(one) for name, one in self._metrics()},
            "logged": {name: value.detach() for name, value in trainer.callback_metrics.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        trainer.fit_loop.load_state_dict(state["loops"])
        call._call_callbacks_load_state_dict(trainer, state)
        if trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(state["data"])
        self._put_metrics(state["metrics"])
        trainer._logger_connector._callback_metrics.update(state["logged"])  # what schedules look at

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Have all of it be afterwards as it is now, whatever is done and loaded inside."""
        loops = self._trainer.fit_loop
        state = copy.deepcopy(self.state_dict() | {"loops": loops.state_dict()})
        flags = [(one, dict(vars(one))) for one in _loops_in(loops)]
        try:
            yield
        finally:
            self.load_state_dict(state)
            for one, names in flags:
                for name in ("_restarting", "_loaded_from_state_dict", "_resuming_from_checkpoint"):
                    setattr(one, name, names[name])

    def _metrics(self) -> Iterator[tuple[str, Any]]:
        """Yield those of torchmetrics by their names in the module: what they count is in no `state_dict`."""
        for name, part in self._trainer.lightning_module.named_modules():
            if hasattr(part, "_defaults") and hasattr(part, "_update_count"):
                yield name, part

    def _kept_by(self, metric: Any) -> dict[str, Any]:
        return {"count": metric._update_count, "values": {name: getattr(metric, name) for name in metric._defaults}}

    def _put_metrics(self, kept: dict[str, Any]) -> None:
        for name, metric in self._metrics():
            if name in kept:
                metric._update_count, metric._computed = kept[name]["count"], None
                for key, value in kept[name]["values"].items():
                    setattr(metric, key, value)


def _loops_in(loop: Any) -> Iterator[Any]:
    yield loop
    for part in vars(loop).values():
        if hasattr(part, "_resuming_from_checkpoint"):
            yield from _loops_in(part)
