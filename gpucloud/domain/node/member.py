"""What is launched as one member of an attempt: its form, where members meet, and all that decides its command."""

from __future__ import annotations

import hashlib
import hmac
import random
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache

from gpucloud.domain.errors import UsageError
from gpucloud.domain.job.spec import Job, Launcher
from gpucloud.domain.node.node import Node
from gpucloud.domain.untrusted import brief, quoted


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
    recorded by a profiler, None for no profile. A script that is to stop has `save` to do so, and what it saved by
    itself `upload` after that to reach the store.
    """

    number: int
    port: int
    store_url: str
    checkpoints: str
    secret: str = ""
    profile_steps: int | None = None
    save: timedelta = timedelta(seconds=60)
    upload: timedelta = timedelta(0)


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


# What a job's `run:` line is: a Python script, or a command line; and what starts it.


# From left to right, as a shell does: a quote inside the other kind of quotes is a letter.
_QUOTED = re.compile(r"""\\.|'[^']*'|"((?:\\.|[^"\\])*)\"""", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A Python script and its words, which arrive byte for byte."""

    words: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """Anything else."""

    words: tuple[str, ...]


def parse_words(line: str) -> tuple[str, ...]:
    """Return the words of a line, split as a shell does it that expands nothing; ValueError for a quote left open."""
    try:
        return tuple(shlex.split(line))
    except ValueError as error:
        raise ValueError(f"{quoted(line)} has a quote that is never closed") from error


@cache
def parse_run(run: str) -> Script | CommandLine:
    """Return the form of a job's `run:`; UsageError when it cannot be split, or a script's line needs a shell."""
    try:
        words = tuple(shlex.split(run))
    except ValueError as error:
        raise UsageError(f"run: {error}: {brief(run, 100)}", hint="close the quote") from error
    if not words:
        raise UsageError("run: is empty", hint="run: train.py")
    if not words[0].endswith(".py"):
        return CommandLine(words=("/bin/sh", "-c", run) if needs_shell(run) else words)
    if needs_shell(run):
        raise UsageError(
            f"run: a script is started without a shell, but its line holds characters for one: {brief(run, 100)}",
            hint="put 'single quotes' around words with $ ` * ? [ ] { } ~ # | & ; < > ( )",
        )
    return Script(words=words)


def launcher_of(job: Job) -> Launcher:
    """Return what starts the job's workers, never AUTO. UsageError for a command line under torchrun."""
    script = isinstance(parse_run(job.run), Script)
    match job.launcher:
        case Launcher.AUTO:
            return Launcher.TORCHRUN if script else Launcher.PLAIN
        case Launcher.TORCHRUN if not script:
            raise UsageError(
                f"launcher: torchrun starts a Python script, not a command line: {brief(job.run, 100)}",
                hint="run: train.py, or launcher: plain",
            )
        case Launcher.TORCHRUN | Launcher.MPI | Launcher.TENSORFLOW | Launcher.PLAIN:
            return job.launcher


def workers_per_node(job: Job) -> int:
    """Return how many ranks a node has: one a GPU, or one where the launcher starts the job once a node."""
    once = launcher_of(job) in (Launcher.PLAIN, Launcher.TENSORFLOW)
    return 1 if once else job.resources.gpus


def runs_in_shell(job: Job) -> bool:
    """Whether a shell reads the job's `run:`, so that it alone knows where further words belong."""
    return isinstance(parse_run(job.run), CommandLine) and needs_shell(job.run)


def needs_shell(run: str) -> bool:
    """Whether a shell would do more with the text than split it into words."""
    return re.search(r"[$`|&;<>()*?\[\]{}~#\n]|^\s*\w+=", _QUOTED.sub(_expanded, run.strip())) is not None


def _expanded(quoted: re.Match[str]) -> str:
    """Return what a shell would still act on: inside double quotes `$` and `` ` ``, escaped or not."""
    return "$" if quoted[1] and ("$" in quoted[1] or "`" in quoted[1]) else ""


# The TCP port at which the members of an attempt meet: the same on every node, and free on all of them.


# Below what Linux and macOS hand out to outgoing connections (32768 and 49152 on), above most services.
_DRAWN_FROM = range(10_000, 32_000)
_DRAWN = 12
_ANSWER = re.compile(r"([0-9]{1,5}) ([0-9]{1,5})((?: [0-9]{1,5})*)", re.ASCII)

LOOK = """import socket, sys
try:
    low, high = open("/proc/sys/net/ipv4/ip_local_port_range").read().split()
except OSError:
    low, high = 49152, 65535
free = []
for port in sys.argv[1:]:
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("", int(port)))
            free.append(port)
        except OSError:
            pass
print(low, high, *free)"""
"""Python that says of the ports in its words which are free, behind the range of those of outgoing connections.

Nodes of an embedded fleet share the ports of one machine and look at the same moment: with SO_REUSEADDR none of them
holds what another one asks for, and a port that somebody listens on is taken all the same.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreePorts:
    """What a node says: which ports are `free` of those that it was asked for, and which it gives to connections."""

    free: tuple[int, ...]
    ephemeral: range


def candidates(purpose: str, node_ids: Sequence[str]) -> tuple[int, ...]:
    """Return ports to ask for; the same for the same purpose on the same nodes.

    A job of the same name on other nodes asks for others: nodes of two embedded fleets share the ports of one machine,
    and two that look at the same moment both find the first one free.
    """
    drawn = random.Random(hashlib.sha256(" ".join([purpose, *node_ids]).encode()).digest())  # noqa: S311  nothing is secret in a port
    return tuple(drawn.sample(_DRAWN_FROM, _DRAWN))


def parse_free(said: str, asked: Sequence[int]) -> FreePorts | None:
    """Return what a node says when it is asked by LOOK; None for anything that is no such answer."""
    match = _ANSWER.fullmatch(said.strip())
    if match is None:
        return None
    free = tuple(int(word) for word in match[3].split())
    return FreePorts(free=free, ephemeral=range(int(match[1]), int(match[2]) + 1)) if set(free) <= set(asked) else None


def common_port(nodes: Sequence[FreePorts]) -> int | None:
    """Return the port to meet at, the first node being the one that listens; None where that has none.

    One that is free on all and that no outgoing connection can take before the launcher does; else as near as can be.
    """
    first, *_ = nodes
    everywhere = [port for port in first.free if all(port in node.free for node in nodes)]
    lasting = [port for port in everywhere if not any(port in node.ephemeral for node in nodes)]
    return next(iter(lasting or everywhere or first.free), None)
