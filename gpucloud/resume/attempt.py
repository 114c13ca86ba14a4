"""How a rank's part in an attempt begins and ends: it goes on from a checkpoint, and is done, or leaves when asked to;
and what it takes away.

What the agent reads of the end: `done-<rank>.json` or `left-<rank>.json` in the attempt's folder, and the exit code.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from gpucloud.domain.checkpoint.chunks import STAGES
from gpucloud.domain.checkpoint.manifest import Level, Promise, Why
from gpucloud.domain.checkpoint.objects import entries_of, header_bytes, placed
from gpucloud.domain.checkpoint.protection import Trial
from gpucloud.domain.errors import StoreError, UsageError
from gpucloud.domain.variables import GPUCLOUD_STORE
from gpucloud.resume.batches import Batches
from gpucloud.resume.folder import AttemptFolder, Progress, say
from gpucloud.resume.profiling import Profiling, Trying
from gpucloud.resume.ranks import Ranks
from gpucloud.resume.reading import Put, unlike
from gpucloud.resume.restoring import Restored
from gpucloud.resume.save.cadence import Window
from gpucloud.resume.save.deciding import Moment, SaveDecider
from gpucloud.resume.settings import Settings, end_quickly, given, overruled, promised, put_back
from gpucloud.resume.state import randomness
from gpucloud.resume.state.modules import plain_entries
from gpucloud.resume.state.randomness import Draws
from gpucloud.resume.state.stages import require_same
from gpucloud.resume.state.state import Content, TrainingState
from gpucloud.resume.state.tree import NAMES, Shares, is_sharded
from gpucloud.system.wholefile import open_whole, write_whole

_REGROUPED = Promise(
    Level.SAME_SAMPLES, "DDP groups gradients anew in its first steps, which are not taken back between two epochs"
)


class Exactness:
    """What a resume from what is saved now can promise, as far as is known; rank 0 says once what lowers it."""

    def __init__(self, *, says: bool) -> None:
        self.promise = Promise()
        self.is_fresh = False
        self._reasons: set[str] = set()
        self._says = says

    def lower(self, promise: Promise) -> None:
        """Promise no more than that from now on."""
        if promise.reason and promise.reason not in self._reasons and self._says:
            told = "a resume from what is saved" if self.is_fresh else "this resume"
            say(f"{told} is {promise.level.value}, not exact: {promise.reason}")
        self._reasons.add(promise.reason)
        self.promise = self.promise.weaker(promise)

    def best_effort(self, why: str) -> None:
        """Promise no more than that, for this reason; an empty one is none."""
        if why:
            self.lower(Promise(Level.BEST_EFFORT, why))


class Continued:
    """Puts the state of a checkpoint back; where DDP groups gradients anew, takes back the first steps after it.

    `own` is what the checkpoint of `step` holds of this rank, empty for a fresh run, and `given` what optimizers were
    given as the run began. All ranks do all of it together.
    """

    def __init__(
        self,
        settings: Settings,
        state: TrainingState,
        ranks: Ranks,
        surroundings: dict[str, Any],
        exactness: Exactness,
        draws: Draws,
    ) -> None:
        self.own: dict[str, Any] = {}
        self.step = 0
        self._gives = given(state.groups())
        self.given: dict[str, Any] = {"began": self._gives, "overruled": []}
        self._state = state
        self._ranks = ranks
        self._surroundings = surroundings
        self._exactness = exactness
        self.draws = draws
        self._is_elsewhere = settings.is_elsewhere
        self._put: Put | None = None  # until the first step
        self._restored: Restored | None = None  # while steps are taken back
        self._vain_steps = _vain_steps(ranks)
        self._taken_back = 0  # steps, of a window of gradients that is still open
        self._between_epochs: str | None = None  # what the state says of itself there, with steps to be taken back

    def begin(self, restored: Restored, trying: Trying, *, rebuckets: bool) -> None:
        """Put all of it back; with `rebuckets`, the first steps are taken back. UsageError where it does not fit."""
        self.step = restored.commit.step
        self._put_back(restored)
        trying.put_back(self.own)
        if rebuckets and self._vain_steps:
            self._restored = restored

    def see_changes(self) -> None:
        """Ahead of the first batch: see what the script has changed since it was put back."""
        self.draws.again()
        why = self._put.changed(self._state.present()) if self._put is not None else ""
        if self._restored is None:
            self._exactness.best_effort(why)
        elif self._between_epochs is not None and (why or self._state.told() != self._between_epochs):
            self._take_nothing_back()  # as a schedule's step between epochs, which must not be

    def begun(self) -> None:
        """The first step that counts is done."""
        self._put = None

    def in_vain(self, window: Window, loader: Batches | None) -> bool:
        """Whether the step just done is one that is taken back; what counts are those of the optimizer."""
        restored = self._restored
        if restored is None or loader is None or not self._vain_steps:
            self._restored = None
            return False
        (still,) = self._ranks.highest(window)
        self._vain_steps -= not still
        self._taken_back = self._taken_back + 1 if still else 0
        if self._vain_steps:
            # A schedule may end with the run's last step, so it is not to go on.
            self._state.apply_others(restored.content(self._ranks.rank))
            if loader.by_epoch and not still:  # the epoch may end before all are done
                loader.go_back(self.own["loader"])
        else:
            self._restored = None
            self._put_back(restored)
            loader.go_back(self.own["loader"])
        return True

    def rehearse(self, passes: Callable[[], object]) -> None:
        """Do the passes of a step as often as steps would be taken back, and put the state back: now none will be."""
        restored, self._restored = self._restored, None
        if restored is None or not self._vain_steps:
            return
        drawn = randomness.capture()
        for _ in range(self._vain_steps):
            passes()
        self._put_state(restored)
        randomness.put_back(drawn)

    def epoch_is_over(self) -> int:
        """See to it that no step is taken back to before that; return how many count after all, of an open window."""
        if self._restored is None or not self._vain_steps:
            return 0
        self._between_epochs = self._state.told()
        if self._taken_back:
            self._take_nothing_back()
        return self._taken_back

    def _put_back(self, restored: Restored) -> None:
        content = self._put_state(restored)
        alike = content.own_rank == self._ranks.rank and self.own["surroundings"]["world"] == self._ranks.world
        self.draws.resumed(self.own["randomness"] if alike else None)

    def _put_state(self, restored: Restored) -> Content:
        content = restored.content(self._ranks.rank)
        worlds = (restored.manifest.world, self._ranks.world)
        require_same(content.own.get(STAGES), self._state.stages, restored.commit.step, worlds=worlds)
        self._state.fit(content, restored.commit.step)
        self._exactness.best_effort(self._state.change(content.own.get("changed", {})))
        self._exactness.lower(restored.manifest.promise)
        self._exactness.lower(promise := promised(content.own["surroundings"], self._surroundings))
        self._overrule(content.own, is_another=promise.level is Level.BEST_EFFORT)
        for optimizer in self._state.optimizers:  # it has stepped: torch need not warn of a schedule that goes on now
            optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001
        shares = Shares(self._ranks) if self._state.sharded else None
        self._put = Put(self._state.present())
        self._exactness.best_effort(unlike(restored.saved(self._ranks.rank), self._put, self._ranks, shares))
        self.own = content.own
        return content

    def _overrule(self, own: Mapping[str, Any], *, is_another: bool) -> None:
        """Name what the script gives its optimizers now, and the checkpoint's state puts back.

        A script that is as it was may make its optimizer by what it resumes: what was named before is named again then.
        Elsewhere a file or a variable may have changed that nobody compares: there it is named unless it is what is put
        back, with or without what a schedule made of it, or may follow from another number of ranks.
        """
        before = own.get("given", {})
        began, known = before.get("began", {}), before.get("overruled", [])
        is_seen = self._is_elsewhere and own["surroundings"]["world"] == self._ranks.world
        stands = (given(self._state.groups()), put_back(self._state.groups()))
        others = [
            key
            for key in overruled(began, self._gives)
            if is_another or key in known or (is_seen and all(ones.get(key) != self._gives[key] for ones in stands))
        ]
        if others:
            told = ", ".join(f"{key} {began[key]} → {self._gives[key]}" for key in others)
            place = GPUCLOUD_STORE if self._is_elsewhere else "`name:` in the job file"
            anew = f"a new run (another {place}) has the script's"
            self._exactness.best_effort(f"{told} in the script: what the checkpoint has is put back; {anew}")
        self.given = {"began": {**self._gives, **{key: began[key] for key in others}}, "overruled": others}

    def _take_nothing_back(self) -> None:
        self._restored = None
        self._exactness.lower(_REGROUPED)


def require_steps_left(step: int, total_steps: int | None, settings: Settings) -> None:
    """UsageError for a checkpoint of a longer run than this one: it would be done before it begins."""
    if total_steps is not None and step > total_steps:
        anew = "give the job file another `name:` to begin at step 0" if not settings.is_elsewhere else _anew(settings)
        raise UsageError(
            f"the checkpoint is of step {step}, and this run has {total_steps} steps: it is over already",
            hint=f"raise total_steps, or {anew}",
        )


def warn_of_nothing_left(step: int, settings: Settings) -> None:
    """Say that the run whose checkpoints are there has come to its end: another one is not begun beside it by itself.

    A job of gpucloud has a place of its own for each run; elsewhere the next start of any script there goes on.
    """
    if settings.is_elsewhere:
        say(
            f"WARNING: the run in {settings.store} is over: it has done its {step} steps, and nothing was left to train"
        )
        say(f"for a new run {_anew(settings)}; for a longer one give it more steps or epochs")


def _anew(settings: Settings) -> str:
    return f"delete {settings.store}, or have {GPUCLOUD_STORE} name another place"


def _vain_steps(ranks: Ranks) -> int:
    """Return how many steps after a resume are done in vain and taken back, where DDP groups gradients anew.

    DDP regroups its gradients after the first backward pass. Sums of three or more numbers then round differently, and
    with NCCL those of two do: measured on four H200, weights are bit-equal after three passes of the very step that
    is trained, with its autocast, and are not after two without it.
    """
    if ranks.device.type == "cuda":
        return 3 if ranks.world > 1 else 0
    return 1 if ranks.world > 2 else 0


# How it ends.


_LONGEST_WHY = 400
SAVED_AND_LEFT = 75
"""Exit code of a rank that saved and left because it was asked to: EX_TEMPFAIL of sysexits(3), try again."""


class Leaving:
    """The end of this rank's part; `moment` says what is saved beside the state of the last step."""

    def __init__(
        self,
        folder: AttemptFolder,
        ranks: Ranks,
        decider: SaveDecider,
        profiling: Profiling,
        moment: Callable[[], Moment],
    ) -> None:
        self._folder = folder
        self._ranks = ranks
        self._decider = decider
        self._profiling = profiling
        self._moment = moment

    def done(self, step: int, progress: Progress) -> None:
        """Commit the final state, then say that the job is done. Raises StoreError where the store takes none.

        Another attempt follows where that may pass. Where the memory for it lacks, the run is trained all the same:
        another would train as much again, and end no better.
        """
        self._profiling.close()
        is_saved = self._decider.last(step, self._moment, Why.LAST)
        progress.done(None if is_saved else self._tell_unsaved(step, progress))
        self._folder.write(f"done-{self._ranks.rank}.json", self._standing(step))
        self._close()

    def _tell_unsaved(self, step: int, progress: Progress) -> str:
        """Say that the final state is not saved, and return why; StoreError where the run is not trained for that."""
        lacking, committed = self._decider.no_memory, self._decider.committed
        lacks, refused = self._ranks.highest(int(lacking is not None), int(self._decider.is_refused))
        if lacks:
            if self._ranks.rank == 0:
                why = f": {lacking}" if lacking else ""
                nothing, beside = "", f"beside the newest checkpoint, of step {committed}, "
                if not committed:
                    nothing, beside = ", as nothing of it could be", ""
                say(
                    f"the run is trained, and its state of step {step} is not saved{nothing}{why}; "
                    f"{beside}what the script has exported or written into `outputs:` is all that there is of it"
                )
            return (lacking or "another rank has no memory for it")[:_LONGEST_WHY]
        progress.unsaved((self._decider.failure or "the save of another rank failed")[:_LONGEST_WHY])
        again = "start the job again: it continues from its last checkpoint"
        error = StoreError(
            f"the final checkpoint, of step {step}, could not be committed",
            hint=f"mend what the store refuses it for, then {again}" if refused else again,
        )
        if not refused:
            self._folder.tell(f"barred-{self._ranks.rank}.json", {"why": str(error)})
        raise error

    def leave(self, step: int) -> NoReturn:
        """Save this step if it can be, and leave with the exit code that says so."""
        self._profiling.close()
        is_saved = self._decider.last(step, self._moment)
        committed = self._decider.committed
        if not is_saved and self._ranks.rank == 0:
            why = f", {lacking}" if (lacking := self._decider.no_memory) else ""
            follows = f"continues from step {committed}" if committed else "begins again, as nothing is saved"
            say(f"step {step} could not be saved{why}: the job {follows}")
        self._folder.write(f"left-{self._ranks.rank}.json", self._standing(step))
        if self._ranks.rank == 0:
            why = f" ({reason})" if (reason := self._folder.stop_reason()) != "stop" else ""
            say(f"asked to stop{why}: {f'saved step {committed}, ' if is_saved else ''}leaving")
        self._close()
        atexit.register(_end_groups)  # the script's own `finally` may still end them, as torch's examples do
        raise SystemExit(SAVED_AND_LEFT)

    def try_(self, trial: Trial, step: int, progress: Progress, *, is_fresh: bool) -> None:
        """End the run where its trial ends; die in the middle of it, once, as ranks do whose machine is interrupted."""
        if step >= trial.steps:
            self.done(step, progress)
            atexit.register(_end_groups)
            raise SystemExit(0)
        if is_fresh and step == trial.killed_at:
            self._decider.settle()
            self._folder.write(f"left-{self._ranks.rank}.json", self._standing(step))  # so that another attempt follows
            self._ranks.highest(0)  # when all have written that
            os.kill(os.getpid(), signal.SIGKILL)

    def _close(self) -> None:
        self._decider.close()
        self._ranks.close()
        self._folder.close()
        atexit.register(end_quickly)

    def _standing(self, step: int) -> dict[str, int]:
        return {"rank": self._ranks.rank, "step": step, "committed_step": self._decider.committed}


def _end_groups() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


# What a script takes away from its run: weights as other programs read them.


_OF_TORCH = (".pt", ".pth", ".bin")


def export(module: torch.nn.Module, path: Path, ranks: Ranks, config: Any = None) -> None:
    """Write the weights of a module, all ranks together, as `Run.export` says."""
    failed = ""
    entries = plain_entries(module)
    wrong = [n for n, value in entries.items() if isinstance(value, torch.Tensor) and value.dtype not in NAMES]
    if wrong and path.suffix not in _OF_TORCH:
        raise UsageError(f"{wrong[0]} has a type that safetensors has none for", hint="run.export('weights.pt')")
    whole = ((name, _gathered(value)) for name, value in entries.items())
    try:
        if ranks.rank:
            for _ in whole:
                pass
        elif path.suffix in _OF_TORCH:
            if not path.parent.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
            with open_whole(path, mode=0o644) as file:
                torch.save(
                    {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in whole}, file
                )
        else:
            path.mkdir(parents=True, exist_ok=True)
            _write_folder(path, entries, whole, config)
    except OSError as error:
        failed = f"cannot write {path}: {error.strerror or error}"
        for _ in whole:  # the other ranks are at it
            pass
    if ranks.highest(int(bool(failed)))[0]:
        raise StoreError(failed or f"rank 0 cannot write {path}", hint="free some space there, or name another place")


def _gathered(value: Any) -> Any:
    """Return the whole tensor, of one that ranks hold together; all of them ask."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    return value.full_tensor() if is_sharded(value) else value


def _write_folder(folder: Path, entries: Mapping[str, Any], whole: Iterable[tuple[str, Any]], config: Any) -> None:
    wanted = {name: value for name, value in entries.items() if isinstance(value, torch.Tensor)}
    tensors = placed((name, NAMES[value.dtype], tuple(value.shape)) for name, value in wanted.items())
    head = header_bytes(entries_of(tensors), {"format": "pt"})
    begins = {tensor.name: len(head) + tensor.begin for tensor in tensors}
    with open_whole(folder / "model.safetensors", mode=0o644) as file:
        file.write(head)
        for name, value in whole:
            if name in begins:
                file.seek(begins[name])
                file.write(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    told = config.to_dict() if hasattr(config, "to_dict") else config
    if told is not None:
        write_whole(folder / "config.json", json.dumps(told, indent=2, default=str) + "\n", mode=0o644)
