"""What is said of the machine that gpucloud runs on."""

from __future__ import annotations

from dataclasses import dataclass

from gpucloud.domain.gate.check import Checked


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that gpucloud needs or can use here; `ok` is None where it is not needed."""

    name: str
    ok: bool | None
    text: str
    hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """This machine: what gpucloud needs of it, and its GPUs."""

    checks: tuple[Check, ...]
    checked: Checked
