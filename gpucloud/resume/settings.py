"""What the launcher tells a training script, read from its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpucloud.domain.errors import UsageError
from gpucloud.domain.trial import Trial, read_trial
from gpucloud.resume.cadence import Cadence, read_cadence

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


def read_settings(env: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings; without a launcher, checkpoints go to `./.gpucloud-checkpoints`. Raises UsageError."""
    directory = env.get("GPUCLOUD_CHECKPOINT_DIRECTORY")
    if directory is not None:
        raise UsageError(
            f"this script uses gpucloud.resume, and its job file names a directory of its own checkpoints, {directory}",
            hint="remove `directory` from the job file's checkpoint section: gpucloud.resume saves by itself",
        )
    folder = env.get("GPUCLOUD_ATTEMPT_DIR")
    return Settings(
        store=_wherever(env.get("GPUCLOUD_STORE", _ALONE)),
        prefix=env.get("GPUCLOUD_CHECKPOINTS", ""),
        attempt=_number(env, "GPUCLOUD_ATTEMPT", 1),
        folder=Path(folder) if folder else None,
        cadence=read_cadence(env.get("GPUCLOUD_CHECKPOINT_EVERY", "auto")),
        keep=_number(env, "GPUCLOUD_CHECKPOINT_KEEP", 3),
        profile_steps=_number(env, "GPUCLOUD_PROFILE_STEPS", 0),
        trial=read_trial(env.get("GPUCLOUD_TRIAL", "")),
        worlds=tuple(map(int, env.get("GPUCLOUD_WORLDS", "").split())),
    )


def _wherever(store: str) -> str:
    """Return the store's URL or path such that it is the same after the script has gone to another folder."""
    return store if "://" in store else str(Path(store).absolute())


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, str(default))
    if not text.isdigit():
        raise UsageError(f"{name}={text!r} is not a number", hint=f"set {name} to a whole number, or not at all")
    return int(text)
