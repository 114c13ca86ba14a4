"""What a machine is told to do next: one step, a question to apt, a reboot; or that it is ready, or stuck."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A command; as root unless `plain`. `text` is its standard input, never a secret. `passes` are exit codes."""

    argv: tuple[str, ...]
    text: str = ""
    plain: bool = False
    passes: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """A file fetched to `name` in the working folder. With `fingerprint` it is an OpenPGP key, kept in binary form.

    It is refused when its first key has another fingerprint.
    """

    url: str
    name: str
    fingerprint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineStep:
    """A change; after it the machine is looked at again, and the same step wanted again is a failure.

    `{folder}` in a command is the working folder with the downloads. `lists`: apt's lists are fresh afterwards.
    `installs`: what it installs is ours to hold. `packages` is the set it was chosen for: when the archive turns out
    not to have it, twice, another way is taken.
    """

    name: str
    why: str
    commands: tuple[Run, ...]
    downloads: tuple[Download, ...] = ()
    lists: bool = False
    installs: bool = False
    packages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Apt is asked what it would do with each of these sets of packages."""

    sets: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reboot:
    """The machine must boot anew; asked for a second time for the same reason, it is stuck."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Nothing is missing; the versions found, by name."""

    versions: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """No step mends this: what is wrong, and one command or edit that does."""

    what: str
    hint: str


Decision = MachineStep | Ask | Reboot | Ready | Stuck
