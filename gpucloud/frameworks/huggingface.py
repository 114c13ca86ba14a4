"""Hugging Face's Trainer: saves beside its training, leaves on a notice, goes on at the exact batch.

    from gpucloud.frameworks.huggingface import resumable

    trainer = resumable(Trainer(model=model, args=args, train_dataset=dataset))
    trainer.train()

A step is over for the run when Trainer asks for the next batch: what it logs, evaluates and saves by itself is done by
then, so that a checkpoint has it all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers.trainer
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import get_last_checkpoint

from gpucloud import resume
from gpucloud.domain.errors import UsageError
from gpucloud.frameworks import keeps_by_itself
from gpucloud.frameworks.accelerate import Prepared
from gpucloud.resume.ranks import Ranks

_Trainer = TypeVar("_Trainer")

_LEAST = 5
"""The version of transformers whose training loop this knows."""

_STATE = "trainer_state.json"

_KEPT = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
"""What goes on from step to step in Trainer's own account; the rest of it is made of its arguments."""


def resumable(trainer: _Trainer) -> _Trainer:
    """Return the trainer, whose `train()` from now on saves, leaves and goes on as a run of `gpucloud.resume` does.

    Its own checkpoints (`save_strategy`) are not needed for that. It trains once. Raises UsageError for what no run can
    go on with exactly: DeepSpeed, and a batch size that is found by trying.
    """
    made: Any = trainer
    if int(transformers.__version__.partition(".")[0]) < _LEAST:
        raise UsageError(
            f"transformers {transformers.__version__} has another training loop than this knows",
            hint=f"pip install 'transformers>={_LEAST}'",
        )
    if made.is_deepspeed_enabled:
        raise keeps_by_itself("let Trainer save, and name its output_dir in the job file: checkpoint: {directory: out}")
    if made.args.auto_find_batch_size:
        raise UsageError(
            "auto_find_batch_size tries batch sizes, so that nobody knows which samples were trained on",
            hint="set per_device_train_batch_size to the one that it found",
        )
    made.add_callback(_Resuming(made))
    return trainer


class _Resuming(TrainerCallback):  # type: ignore[misc]  # of a package that mypy does not look into
    """Drives a run from the trainer's loop."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._train, trainer.train = trainer.train, self._trained
        self._loader, trainer.get_train_dataloader = trainer.get_train_dataloader, self._batches_of_the_run
        self._pass, trainer.training_step = trainer.training_step, self._passed
        self._run: resume.Run | None = None
        self._batches: Prepared | None = None
        self._place: Path | None = None  # while it trains: where its account of itself is for it to go on from
        self._step = 0
        self._stepped = self._has_rehearsed = False
        self._loss: Any = None
        self._phase = contextlib.ExitStack()

    # What stands in place of the trainer's own.

    def _trained(self, resume_from_checkpoint: Any = None, *args: Any, **named: Any) -> Any:
        if self._run is not None:
            raise UsageError(
                "this trainer has trained already, and its run is over",
                hint="give another Trainer to another `resumable`, in a job of its own",
            )
        self._step = _step_to_go_on_from()
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self._trainer.args.output_dir)
        if resume_from_checkpoint and not self._step:
            raise UsageError(
                f"the run begins at step 0, and trainer.train() is to go on from {resume_from_checkpoint}",
                hint="leave resume_from_checkpoint out: the run goes on from its own checkpoints. Weights to begin "
                "with go to from_pretrained",
            )
        while True:
            try:
                with self._placed() as place:
                    return self._train(place, *args, **named)
            except _OtherStep as found:
                self._step = found.step

    @contextlib.contextmanager
    def _placed(self) -> Iterator[str | None]:
        """Give Trainer a checkpoint of its own that says which step it was at, and no more: the run has all else."""
        trainer = self._trainer
        skips = transformers.trainer.skip_first_batches
        with tempfile.TemporaryDirectory(prefix="gpucloud-") as folder:
            self._place = Path(folder)
            if self._step:
                trainer._load_from_checkpoint = lambda *_args, **_named: None
                self._write_account(self._step)
            # What was trained on is passed over by the run.
            transformers.trainer.skip_first_batches = lambda loader, count=0: (
                loader if loader is self._batches else skips(loader, count)
            )
            try:
                yield folder if self._step else None
            finally:
                self._place = None
                transformers.trainer.skip_first_batches = skips
                trainer.__dict__.pop("_load_from_checkpoint", None)

    def _batches_of_the_run(self) -> Any:
        loader = self._loader()
        if self._place is None:
            return loader
        self._batches = Prepared(loader, asked=self._tell)
        if self._step:
            self._write_account(self._step)
        return self._batches

    def _passed(self, model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
        if self._run is not None and not self._has_rehearsed:
            self._has_rehearsed = True
            self._run.rehearse(lambda: self._with_other_ranks(model, dict(inputs), *args, **named))
        loss = self._pass(model, inputs, *args, **named)
        self._loss = loss if self._loss is None else self._loss + loss  # of a step in parts, each has its share
        return loss

    def _with_other_ranks(self, model: Any, *args: Any, **named: Any) -> None:
        """Do a pass in which DDP sums gradients, also where the first part of a step would leave that to the last."""
        ddp = next((one for one in model.modules() if isinstance(one, DistributedDataParallel)), None)
        synchronizes = ddp is None or ddp.require_backward_grad_sync
        try:
            if ddp is not None:
                ddp.require_backward_grad_sync = True
            self._pass(model, *args, **named)
        finally:
            if ddp is not None:
                ddp.require_backward_grad_sync = synchronizes

    def _write_account(self, step: int) -> None:
        """Write which step Trainer is to think it was at, for it to know its epoch and how much of that is left.

        Saved at an epoch's last step, the run goes on with what follows it: Trainer is to find the epoch with one step
        left, for which there are no batches. (Where an epoch is one step, it begins with the next one.)
        """
        assert self._place is not None  # noqa: S101  it is asked while Trainer trains
        args = self._trainer.args
        if self._batches is not None and transformers.trainer.has_length(self._batches):
            steps = -(-len(self._batches) // args.gradient_accumulation_steps)
            step -= steps > 1 and step % steps == 0
        account = TrainerState(global_step=step, train_batch_size=self._trainer._train_batch_size)
        for name in ("logging_steps", "eval_steps", "save_steps"):
            setattr(account, name, getattr(args, name))
        account.save_to_json(str(self._place / _STATE))

    # What Trainer says of its training.

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer, batches = self._trainer, self._batches
        assert batches is not None  # noqa: S101  Trainer has asked for its loader before
        state.compute_steps(args, state.max_steps)
        model = trainer.model_wrapped
        run = resume.init(
            model=trainer.model if isinstance(model, torch.nn.DataParallel) else model,
            optimizer=trainer.optimizer,
            scheduler=trainer.lr_scheduler,
            scaler=trainer.accelerator.scaler,
            trainer=_Account(trainer, state, control),
            total_steps=state.max_steps,
            seed=args.seed,
        )
        if run.steps_done != self._step:  # what was looked at before is damaged: another one was put back
            raise _OtherStep(run.steps_done)
        trainer._initial_global_step = run.steps_done
        batches.follow(run)
        self._run = run

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._stepped = True
        self._report(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._tell()
        self._report(control)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._tell()
        if self._run is not None:
            self._run.done()

    def _report(self, control: Any) -> None:
        """Say what else than training goes on until the next batch is asked for."""
        if self._run is not None and (control.should_evaluate or control.should_save):
            self._phase.enter_context(self._run.phase("evaluate" if control.should_evaluate else "save"))

    def _tell(self) -> None:
        """The step before is over, with all that Trainer does after it."""
        self._phase.close()
        if self._stepped and self._run is not None:
            loss, self._loss, self._stepped = self._loss, None, False
            self._run.step(loss=loss)


class _OtherStep(Exception):
    """The run went on from this step, and Trainer was told another."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


def _step_to_go_on_from() -> int:
    """Return the step that a run would go on from, the same on all ranks; 0 for none."""
    saved = resume.peek()
    ranks = Ranks()
    (step,) = ranks.highest(saved.step if saved else 0)
    ranks.close()
    return step


class _Account:
    """What Trainer and its callbacks keep in mind from step to step, with a state as all else has one."""

    def __init__(self, trainer: Any, state: Any, control: Any) -> None:
        self._trainer, self._state, self._control = trainer, state, control

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        fields = dataclasses.asdict(self._state)
        told = {
            "state": {name: fields[name] for name in _KEPT},
            "callbacks": [[type(one).__name__, _kept_by(one)] for one in self._stateful()],
            "flos": trainer.current_flos,
            "last_logged": trainer._globalstep_last_logged,
        }
        return {"told": json.dumps(told), "loss": trainer._tr_loss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer, told = self._trainer, json.loads(state["told"])
        for name, value in told["state"].items():
            setattr(self._state, name, value)
        for one, (name, kept) in zip(self._stateful(), told["callbacks"], strict=False):
            if type(one).__name__ == name:
                vars(one).update(kept)
        trainer.current_flos = told["flos"]
        trainer._globalstep_last_logged = told["last_logged"]
        trainer._tr_loss.copy_(state["loss"])  # since it was logged last
        trainer._total_loss_scalar = -trainer._tr_loss.item()  # its `train_loss` is that of this `train()`

    def _stateful(self) -> list[Any]:
        """Return those that Trainer itself saves when it is asked to; what it decided for the next step among them."""
        return [
            one
            for one in (*self._trainer.callback_handler.callbacks, self._control)
            if isinstance(one, ExportableState)
        ]


def _kept_by(one: Any) -> dict[str, Any]:
    """Return what of it changes; what it was made with is the script's, but for Trainer's own decisions."""
    told = one.state()
    return {**(told["args"] if isinstance(one, transformers.TrainerControl) else {}), **told["attributes"]}
