"""A training run that can be interrupted at any step and continues exactly there."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from gpucloud.domain.errors import StoreError, UsageError
from gpucloud.domain.manifest import Why
from gpucloud.domain.trial import Trial
from gpucloud.resume import randomness
from gpucloud.resume.capture import Capture
from gpucloud.resume.folder import AttemptFolder, say
from gpucloud.resume.keeping import Keeper, Moment
from gpucloud.resume.loader import Loader, require_split
from gpucloud.resume.naming import replicated
from gpucloud.resume.profiling import Profiling
from gpucloud.resume.progress import Progress
from gpucloud.resume.promise import Level, lower, promised, surroundings
from gpucloud.resume.ranks import Ranks
from gpucloud.resume.restoring import Restored, find
from gpucloud.resume.saving import Saver
from gpucloud.resume.settings import Settings, read_settings
from gpucloud.resume.startup import end_quickly
from gpucloud.resume.state import TrainingState
from gpucloud.resume.trying import Trying
from gpucloud.resume.windows import Window, Windows
from gpucloud.resume.writer import Writer
from gpucloud.store import open_store
from gpucloud.store.checkpoints import Checkpoints

SAVED_AND_LEFT = 75
"""Exit code of a rank that saved and left because it was asked to."""


def init(
    *,
    model: Any,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    total_steps: int | None = None,
    seed: int = 0,
    **others: Any,
) -> Run:
    """Return the run, its state restored from the newest whole checkpoint, or fresh.

    Call it on every rank, after the process group and everything with state is made: a model that is sharded, by
    `fully_shard` or `parallelize_module`, must be so already. `others` are further objects with state_dict() and
    load_state_dict(). `seed` orders the data and seeds every rank's random number generators. Raises UsageError when
    the checkpoint does not fit, StoreError when the store does not answer.
    """
    settings = read_settings()
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, **others}
    state = TrainingState({name: part for name, part in parts.items() if part is not None})
    ddp = replicated(model) if isinstance(model, torch.nn.Module) else None
    rebuckets = ddp is not None and (ddp.static_graph or not ddp.find_unused_parameters)
    return Run(settings, state, total_steps=total_steps, seed=seed, rebuckets=rebuckets)


class Run:
    """One attempt's part of a job, on this rank. Steps count from 1; `steps_done` is the last one done."""

    def __init__(
        self, settings: Settings, state: TrainingState, *, total_steps: int | None, seed: int, rebuckets: bool
    ) -> None:
        self.total_steps = total_steps
        self.level = Level.EXACT
        self._settings = settings
        self._state = state
        self._seed = seed
        self._folder = AttemptFolder(settings.folder)
        self._ranks = Ranks()
        self._surroundings = surroundings(self._ranks.world, state.arrangement)
        self._data_ranks = self._ranks.rank, self._ranks.world
        self._loader: Loader | None = None
        self._checkpoints = Checkpoints(open_store(settings.store), settings.prefix, keep=settings.keep)
        self._trying = Trying(settings.trial)
        capture = Capture(state, self._ranks)
        writer = Writer(settings.store, settings.prefix, settings.keep, capture.arena.descriptor)
        with randomness.kept():  # what the script draws next is the same whether it resumes or not
            restored = find(self._checkpoints, self._ranks, state)
            self._own = self._put_back(restored) if restored else {}
        self.steps_done = restored.commit.step if restored else 0
        self._is_fresh = restored is None
        self._restored = restored if rebuckets else None
        self._vain_steps = _vain_steps(self._ranks)
        self._windows = Windows(state.optimizers)
        self._randomness_set = False
        saver = Saver(self._checkpoints, writer, capture, self._ranks, committed=self.steps_done)
        self._keeper = Keeper(settings.cadence, self._checkpoints, saver, capture, self._ranks, self._folder)
        self._keeper.of_a_trial = settings.trial is not None
        self._progress = Progress(self._folder if self._ranks.rank == 0 else AttemptFolder(None), self)
        self._keeper.progress = self._progress
        self._profiling = Profiling(self._folder, settings.profile_steps, self._ranks.rank)
        if self._ranks.rank == 0:
            self._begin(restored)

    @property
    def rank(self) -> int:
        """This process among all that train, from 0."""
        return self._ranks.rank

    @property
    def epoch(self) -> int:
        """The epoch, from 0, of the loader's last batch."""
        return self._loader.epoch if self._loader else 0

    @property
    def committed_step(self) -> int:
        """The step of the newest checkpoint that counts; 0 when there is none."""
        return self._keeper.committed

    def loader(
        self,
        dataset: Dataset[Any],
        *,
        global_batch: int,
        num_workers: int = 0,
        shuffle: bool = True,
        over: Any = None,
        **options: Any,
    ) -> Loader:
        """Return the run's batches, from the next one on; `options` go to torch's DataLoader.

        `global_batch` is the number of samples in a step over all ranks: keep it, and the same samples make the
        same steps on any number of ranks. With tensor parallelism, where some ranks train on the same samples, `over`
        is the dimension of the device mesh over which batches are split, as `mesh["data"]`; ranks that share their
        samples then draw the same random numbers. Raises UsageError for a second loader, and when it cannot be split:
        neither over these ranks nor, in a job on a range of nodes, over any number of them that it may come to.
        """
        if self._loader is not None:
            raise UsageError("a run has one loader", hint="use torch's DataLoader for evaluation data")
        if over is not None:
            self._data_ranks = over.get_local_rank(), over.size()
        else:
            require_split(global_batch, self._settings.worlds)
        loader = Loader(
            dataset,
            global_batch=global_batch,
            ranks=self._data_ranks,
            seed=self._seed,
            shuffle=shuffle,
            options={"num_workers": num_workers, **options},
        )
        position = self._own.get("loader")
        if position:
            loader.load_state_dict(position)
            if position["global_batch"] != global_batch:
                self._lower(Level.BEST_EFFORT, f"global_batch {position['global_batch']} → {global_batch}")
        loader.begin = self._begin_batches
        loader.waited = self._progress.waited
        loader.ended = lambda: self.total_steps is not None and self.steps_done >= self.total_steps
        self._loader = loader
        return loader

    def step(self, *, loss: Any = None) -> None:
        """Say that a step is done; `loss` (number or tensor) is for reports.

        Saves when it is due, or when the agent of any node wishes it: copies the state, and the rest goes on beside the
        training. When an agent asks to stop, all ranks save this step, wait until it counts and leave: SystemExit(75).
        Where gradients are gathered over several steps, saving and leaving wait for the optimizer's next step. With DDP
        over three or more ranks (on GPUs: two), the first step or steps after a resume are taken back and their batches
        handed out again.
        Raises Fenced when another attempt has taken over.
        """
        window = self._windows.now()
        if self._in_vain(window):
            return
        self.steps_done += 1
        self._progress.stepped(loss)
        self._trying.stepped(loss)
        if not self._profiling.over:
            with self._progress.phase("profile"):
                self._profiling.stepped()
        if self._keeper.keep(self.steps_done, self._moment, window):
            self._leave()
        if self._settings.trial is not None:
            self._try(self._settings.trial)

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Report that something else than training goes on inside (`evaluate`), so that nobody takes it for a hang."""
        return self._progress.phase(name)

    def done(self) -> None:
        """Commit the final state, then say that the job is done: nothing else counts as success. Raises StoreError."""
        self._profiling.close()
        if not self._keeper.last(self.steps_done, self._moment, Why.LAST):
            raise StoreError(
                f"the final checkpoint, of step {self.steps_done}, could not be committed",
                hint="start the job again: it continues from its last checkpoint",
            )
        self._progress.write()
        self._folder.write(f"done-{self._ranks.rank}.json", self._standing())
        self._keeper.close()
        self._ranks.close()
        atexit.register(end_quickly)

    def _put_back(self, restored: Restored) -> dict[str, Any]:
        content = restored.content(self._ranks.rank)
        self._state.fit(content, restored.commit.step)
        self._trying.put_back(content.own)
        level, why = promised(content.own["surroundings"], self._surroundings)
        self._lower(lower(level, Level(restored.manifest.level)), why)
        if content.own_rank != self._ranks.rank or content.own["surroundings"]["world"] != self._ranks.world:
            del content.own["randomness"]
        return content.own

    def _begin(self, restored: Restored | None) -> None:
        base = restored.commit if restored else None
        if not self._checkpoints.begin(base=base, attempt=self._settings.attempt):
            say("this store ignores conditional writes: two attempts at once would not notice each other")
        if restored:
            say(f"resumed from step {restored.commit.step}, {self.level.value} (attempt {self._settings.attempt})")

    def _lower(self, level: Level, why: str) -> None:
        if why and self._ranks.rank == 0 and lower(level, self.level) is not self.level:
            say(f"this resume is {level.value}, not exact: {why}")
        self.level = lower(level, self.level)

    def _begin_batches(self) -> None:
        # Whatever the script drew since `init`, the first batch finds the generators as the last step left them.
        if not self._randomness_set:
            self._set_randomness()
            self._randomness_set = True
        self._progress.batch_wanted()

    def _set_randomness(self) -> None:
        if "randomness" in self._own:
            randomness.put_back(self._own["randomness"])
        else:
            randomness.seed_all(randomness.mix(self._seed, self.steps_done), self._data_ranks[0])

    def _in_vain(self, window: Window) -> bool:
        """Whether the step just done is one that is taken back; what counts are those of the optimizer."""
        restored = self._restored
        if restored is None or self._loader is None or not self._vain_steps:
            self._restored = None
            return False
        (still,) = self._ranks.highest(window)
        self._vain_steps -= not still
        if self._vain_steps:
            # A schedule may end with the run's last step, so it is not to go on.
            self._state.apply_others(restored.content(self._ranks.rank))
        else:
            self._restored = None
            self._own = self._put_back(restored)
            self._loader.load_state_dict(self._own["loader"])
            self._loader.go_back()
            self._randomness_set = False
        return True

    def _moment(self) -> Moment:
        return Moment(
            step=self.steps_done,
            level=self.level if self._loader else Level.BEST_EFFORT,
            own={
                "randomness": randomness.capture(),
                "loader": self._loader.state_dict() if self._loader else None,
                "surroundings": self._surroundings,
                **self._trying.state(),
            },
        )

    def _leave(self) -> None:
        self._profiling.close()
        if not self._keeper.last(self.steps_done, self._moment) and self._ranks.rank == 0:
            say(f"step {self.steps_done} could not be saved: the job continues from step {self.committed_step}")
        self._folder.write(f"left-{self._ranks.rank}.json", self._standing())
        if self._ranks.rank == 0:
            say(f"asked to stop ({self._folder.stop_reason()}): saved step {self.committed_step}, leaving")
        self._keeper.close()
        self._ranks.close()
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
        atexit.register(end_quickly)
        raise SystemExit(SAVED_AND_LEFT)

    def _try(self, trial: Trial) -> None:
        """End the run where its trial ends; die in the middle of it, once, as ranks do whose machine is taken."""
        if self.steps_done >= trial.steps:
            self.done()
            if dist.is_available() and dist.is_initialized():
                dist.destroy_process_group()
            raise SystemExit(0)
        if self._is_fresh and self.steps_done == trial.killed_at:
            self._keeper.settle()
            self._folder.write(f"left-{self._ranks.rank}.json", self._standing())  # so that another attempt follows
            self._ranks.highest(0)  # when all have written that
            os.kill(os.getpid(), signal.SIGKILL)

    def _standing(self) -> dict[str, int]:
        return {"rank": self._ranks.rank, "step": self.steps_done, "committed_step": self.committed_step}


def _vain_steps(ranks: Ranks) -> int:
    """Return how many steps after a resume are done in vain and taken back, where DDP groups gradients anew.

    DDP regroups its gradients after the first backward pass. Sums of three or more numbers then round differently, and
    with NCCL those of two do: measured on four H200, weights are bit-equal after three passes of the very step that
    is trained, with its autocast, and are not after two without it.
    """
    if ranks.device.type == "cuda":
        return 3 if ranks.world > 1 else 0
    return 1 if ranks.world > 2 else 0
