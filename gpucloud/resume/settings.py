"""What the launcher tells a training script, how exactly it may promise to continue, and a quicker start."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import json
import os
import shlex
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpucloud.domain.checkpoint.manifest import Level, Promise
from gpucloud.domain.checkpoint.protection import Trial, read_trial
from gpucloud.domain.errors import UsageError
from gpucloud.domain.variables import (
    GPUCLOUD_ATTEMPT,
    GPUCLOUD_ATTEMPT_DIR,
    GPUCLOUD_CHECKPOINT_DIRECTORY,
    GPUCLOUD_CHECKPOINT_EVERY,
    GPUCLOUD_CHECKPOINT_KEEP,
    GPUCLOUD_CHECKPOINTS,
    GPUCLOUD_PROFILE_STEPS,
    GPUCLOUD_RECIPE,
    GPUCLOUD_STORE,
    GPUCLOUD_TRIAL,
    GPUCLOUD_WORLDS,
)
from gpucloud.resume.save.cadence import Cadence, read_cadence
from gpucloud.resume.state.generators import SEEDING

_ALONE = "./.gpucloud-checkpoints"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Where checkpoints go, when, how many are kept; `folder` is where this node's agent looks, None without one.

    `profile_steps` of this attempt are recorded by a profiler, 0 for none. `trial` is None for the whole run. `worlds`
    are all numbers of ranks on which a job on a range of nodes may train, empty where there is but one.
    """

    store: str
    prefix: str
    attempt: int
    folder: Path | None
    cadence: Cadence
    keep: int
    profile_steps: int = 0
    trial: Trial | None = None
    worlds: tuple[int, ...] = ()

    @property
    def is_elsewhere(self) -> bool:
        """Whether something else than gpucloud has started the script: it tells nothing of what that is made of."""
        return self.folder is None


def read_settings(env: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings; without a launcher, checkpoints go to `./.gpucloud-checkpoints`. Raises UsageError."""
    directory = env.get(GPUCLOUD_CHECKPOINT_DIRECTORY)
    if directory is not None:
        raise UsageError(
            f"this script uses gpucloud.resume, and its job file names a directory of its own checkpoints, {directory}",
            hint="remove `directory` from the job file's checkpoint section: gpucloud.resume saves by itself",
        )
    folder = env.get(GPUCLOUD_ATTEMPT_DIR)
    return Settings(
        store=_wherever(env.get(GPUCLOUD_STORE, _ALONE)),
        prefix=env.get(GPUCLOUD_CHECKPOINTS, ""),
        attempt=_number(env, GPUCLOUD_ATTEMPT, 1),
        folder=Path(folder) if folder else None,
        cadence=read_cadence(env.get(GPUCLOUD_CHECKPOINT_EVERY, "auto")),
        keep=_number(env, GPUCLOUD_CHECKPOINT_KEEP, 3),
        profile_steps=_number(env, GPUCLOUD_PROFILE_STEPS, 0),
        trial=read_trial(env.get(GPUCLOUD_TRIAL, "")),
        worlds=tuple(map(int, env.get(GPUCLOUD_WORLDS, "").split())),
    )


def _wherever(store: str) -> str:
    """Return the store's URL or path such that it is the same after the script has gone to another folder."""
    return store if "://" in store else str(Path(store).absolute())


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, str(default))
    if not text.isdigit():
        raise UsageError(f"{name}={text!r} is not a number", hint=f"set {name} to a whole number, or not at all")
    return int(text)


# Makes a training process start and end sooner.


def import_ahead() -> None:
    """Import what torch's optimizers and DDP import on first use, without collecting garbage meanwhile.

    That is `torch._dynamo`: with torch 2.13 its hundred thousands of new objects make the collector run through all
    of them again and again, 0.4 of 1.1 CPU seconds. Outside a launched rank nothing is imported.
    """
    if "RANK" not in os.environ or not gc.isenabled():
        return
    gc.disable()
    try:
        importlib.import_module("torch._dynamo")
    finally:
        gc.enable()


def end_quickly() -> None:
    """Spare the interpreter its last search for cycles among everything imported: 0.9 s with torch 2.13."""
    gc.freeze()


# How exactly a resumed run continues, and why it may be less than exact.


_SUMS = ("world", "per_node", "arrangement", "threads", "vectors")
"""What changes the order of sums, and nothing else."""


def surroundings(world: int, arrangement: str, env: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return what exactness depends on besides the checkpoint; `arrangement` says how ranks hold the state.

    `per_node` ranks share a machine, by which NCCL and gloo choose the order of their sums; on the CPU `threads` and
    the width of its vectors choose that of a matrix product. The launcher tells what the script is made of: its code,
    its command line, and what else of the job file reaches it. Another launcher does not, and it is looked for here.
    """
    recipe = env.get(GPUCLOUD_RECIPE)
    told = {
        **(json.loads(recipe) if recipe is not None else _made_of()),
        "world": world,
        "per_node": env.get("LOCAL_WORLD_SIZE", str(world)),
        "arrangement": arrangement,
        "torch": str(torch.__version__),
        "seeding": SEEDING,
    }
    if torch.cuda.is_available():
        precision = torch.get_float32_matmul_precision()
        return {
            **told,
            "device": torch.cuda.get_device_name(),
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
            "precision": precision,
        }
    if torch.backends.mps.is_available():
        return {**told, "device": "mps"}
    return {
        **told,
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
    }


def _made_of() -> dict[str, Any]:
    """Return what can be seen of this process's script: its files by their hashes, and its options by theirs.

    The options may hold a secret, which has no place in a checkpoint. Launchers of old count ranks by one of them.
    """
    options = [word for word in sys.argv[1:] if not word.startswith(("--local-rank=", "--local_rank="))]
    return {"code": _own_files(), "options": _short(shlex.join(options).encode())}


def _own_files() -> dict[str, str]:
    """Return the script's file and the modules beside it that are imported by now; none where there is no file."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if file is None:
        return {}
    # `python -m package.train` counts from the folder that it was started in.
    root = Path(sys.path[0] if getattr(main, "__spec__", None) is not None else Path(file).parent).absolute()
    others = tuple(map(Path, {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}))
    found = {}
    for name in {file, *(getattr(one, "__file__", None) or "" for one in tuple(sys.modules.values()))}:
        path = Path(name).absolute()
        if path.suffix != ".py" or not path.is_relative_to(root) or any(map(path.is_relative_to, others)):
            continue
        with contextlib.suppress(OSError):
            found[path.relative_to(root).as_posix()] = _short(path.read_bytes())
    return found


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def tuned() -> Promise:
    """Return what code that `torch.compile` made for a GPU allows, if there is any.

    Inductor chooses among kernels by their speed when it first meets them, and remembers that in a folder. Where it
    chooses anew a sum may be rounded in another order; its deterministic mode does not prevent that (torch 2.11).
    """
    cache = getattr(sys.modules.get("torch._inductor.codecache"), "PyCodeCache", None)
    if not torch.cuda.is_available() or not getattr(cache, "modules", None):
        return Promise()
    return Promise(Level.SAME_SAMPLES, "torch.compile chooses its kernels by their speed, on each machine anew")


def promised(before: Mapping[str, Any], now: Mapping[str, Any]) -> Promise:
    """Return what a resume promises."""
    changed = [key for key in now if _differs(before.get(key), now[key])]
    if not changed:
        return Promise()
    level = Level.SAME_SAMPLES if set(changed) <= set(_SUMS) else Level.BEST_EFFORT
    # The arrangement names the world too, where that is what changed, and other machines have other shares of it.
    told = [key for key in changed if key not in ("arrangement", "per_node") or "world" not in changed]
    return Promise(level, ", ".join(_change(key, before.get(key), now[key]) for key in told))


def _differs(before: Any, now: Any) -> bool:
    return bool(_other_files(before, now)) if _are_files(before, now) else before != now


def _are_files(before: Any, now: Any) -> bool:
    return isinstance(before, Mapping) and isinstance(now, Mapping)


def _other_files(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the files that are others than before; what one of the two had not imported yet is not known of it."""
    return sorted(name for name, sha in now.items() if before.get(name, sha) != sha)


def _change(key: str, before: Any, now: Any) -> str:
    if _are_files(before, now):
        return f"{key} of {', '.join(_other_files(before, now))}"
    return f"{key} is another" if isinstance(now, Mapping) or isinstance(before, Mapping) else f"{key} {before} → {now}"


# What a script gives its optimizers, and a checkpoint then overrules.


_PLAIN = (bool, int, float)


def given(groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the numbers that the script has given its optimizers, by name; of many groups the least and the most.

    A schedule has changed `lr` by then: what it was made from is `initial_lr`.
    """
    told = {}
    for name, ones in groups.items():
        for key in dict.fromkeys(key for group in ones for key in group if key != "initial_lr"):
            values = [
                _plain(group.get("initial_lr", group.get(key)) if key == "lr" else group.get(key)) for group in ones
            ]
            if all(value == values[0] for value in values):
                told[f"{name} {key}"] = values[0]
            elif all(type(value) in _PLAIN for value in values):
                told[f"{name} {key}"] = [min(values), max(values)]
    return {key: value for key, value in told.items() if value is not None}


def put_back(groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the numbers that optimizers go on with, as `given` does; `lr` is what a schedule has made of it."""
    return given({name: [{**group, "initial_lr": group.get("lr")} for group in ones] for name, ones in groups.items()})


def overruled(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the names of what the script was given otherwise when the checkpoint's run began."""
    return [key for key in now if before.get(key, now[key]) != now[key]]


def _plain(value: Any) -> Any:
    """Return a number, or a short row of them, as JSON keeps it; None for all else."""
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 and not value.is_meta else None
    if isinstance(value, (tuple, list)):
        return [*value] if len(value) <= 4 and all(type(one) in _PLAIN for one in value) else None
    return value if type(value) in _PLAIN else None
