"""All that decides how one member of an attempt is launched."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from gpucloud.domain.job import Job, Launcher
from gpucloud.domain.launch.form import CommandLine, Script
from gpucloud.domain.node import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A member: its node, and where bootstrap and sync put things on it (absolute paths).

    `image` is the job's container image as it was pulled there, pinned; None: the job runs on the node itself.
    """

    node: Node
    python: str
    package: str
    code: str
    root: str
    image: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStart:
    """What is the same for every member; `port` is drawn anew for each attempt, `checkpoints` is a key prefix.

    `secret` proves one member to another; empty where the launcher needs none. `profile_steps` of each rank are
    recorded by a profiler, None for no profile.
    """

    number: int
    port: int
    store_url: str
    checkpoints: str
    secret: str = ""
    profile_steps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One member among all."""

    form: Script | CommandLine
    launcher: Launcher
    job: Job
    start: AttemptStart
    places: tuple[Place, ...]
    rank: int
    secrets: Mapping[str, str]

    @property
    def place(self) -> Place:
        """Where it runs."""
        return self.places[self.rank]

    @property
    def master(self) -> str:
        """The private address of member 0."""
        return self.places[0].node.private_address

    @property
    def python(self) -> str:
        """The job's Python: the node's, or the image's own."""
        return "python3" if self.job.image else self.place.python


def attempt_folder(root: str, number: int) -> str:
    """Return the folder of an attempt below the agent's root."""
    return f"{root}/attempts/{number:04d}"


def attempt_secret(key: bytes, job: str, number: int) -> str:
    """Return what the members of an attempt know and nobody else: `key` is the cluster's private SSH key.

    Every supervisor that reaches the nodes has that key, so that all tell the same; it cannot be found from this.
    """
    return hmac.new(key, f"gpucloud attempt {job} {number}".encode(), hashlib.sha256).hexdigest()
