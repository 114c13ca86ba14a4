"""What a step of the bootstrap is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpucloud.domain.bootstrap.facts import Facts
from gpucloud.domain.bootstrap.wanted import Wanted

REBOOT_WANTED = 101
"""The exit code of a command after which the node must boot anew before it can go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What a step runs on the node; with `reboots`, exit code 101 asks for a reboot and for the command once more."""

    argv: tuple[str, ...]
    stdin: bytes = b""
    timeout_s: float = 60.0
    reboots: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A change: `needed` says why it must be made, or None; after `commands`, fresh facts must answer None.

    The facts are not asked again where the commands' own success says as much (`proves_itself`).
    """

    name: str
    proves_itself: bool = False
    needed: Callable[[Facts, Wanted], str | None]
    commands: Callable[[Facts, Wanted], tuple[Command, ...]]
