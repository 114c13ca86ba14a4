"""Checkpoints as text for people, and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpucloud.cli.render import table
from gpucloud.domain import codec
from gpucloud.domain.quantities import format_size
from gpucloud.domain.standing import CheckpointMark, Standing, Superfluous
from gpucloud.usecases.checkpoints import Damage

_WORDS = {
    CheckpointMark.NEXT: "restored first",
    CheckpointMark.BASE: "base of this generation",
    CheckpointMark.KEPT: "kept",
    CheckpointMark.DAMAGED: "its manifest is damaged",
    CheckpointMark.INCOMPLETE: "objects are missing",
    CheckpointMark.UNREACHABLE: "its generation has no record: never restored",
}


def standing_text(standing: Sequence[Standing]) -> str:
    """Return one line a checkpoint, the one that a restore tries first above; then why some are not exact."""
    rows = [
        ("step", "generation", "committed (UTC)", "size", "objects", "ranks", "level", "why", ""),
        *map(_row, standing),
    ]
    reasons = {one.found.manifest.promise: None for one in standing if one.found.manifest}
    told = [f"{one.level.value}: {one.reason}" for one in reasons if one.reason]
    return "\n\n".join([table(rows), *(["\n".join(told)] if told else [])])


def standing_json(one: Standing) -> dict[str, Any]:
    """Return a checkpoint as an object; what its manifest would say is null where that is damaged."""
    manifest = one.found.manifest
    return {
        **_named(one),
        "committed_at": codec.plain(one.found.committed_at),
        "objects": len(manifest.pieces) if manifest else None,
        "ranks": manifest.world if manifest else None,
        "level": manifest.promise.level.value if manifest else None,
        "reason": manifest.promise.reason if manifest else None,
        "why": manifest.why.value if manifest else None,
        "marks": [mark.value for mark in CheckpointMark if mark in one.marks],
    }


def damage_json(one: Standing, damages: Sequence[Damage]) -> dict[str, Any]:
    """Return a verified checkpoint as an object, with what is damaged of it."""
    keys = {piece.key for piece in one.found.manifest.pieces} if one.found.manifest else set()
    damaged = [{"object": d.key, "part": d.part or None, "what": d.what} for d in damages if d.key in keys]
    return {**_named(one), "whole": one.found.manifest is not None and not damaged, "damaged": damaged}


def gone_text(standing: Sequence[Standing], gone: Superfluous, *, deleted: bool) -> str:
    """Return what went or would go, and how much that is."""
    if not gone.keys:
        return "nothing is superfluous"
    rows = [("step", "generation", "committed (UTC)", "size"), *(_row(one)[:4] for one in _of(standing, gone))]
    size = sum(one.size or 0 for one in _of(standing, gone))
    unfinished = f", and {_count(gone.unfinished, 'object')} of saves that were never committed"
    sums = f"{_count(len(gone.commits), 'checkpoint')}, {format_size(size)}{unfinished if gone.unfinished else ''}"
    return "\n\n".join([*([table(rows)] if gone.commits else []), sums + (" deleted" if deleted else "")])


def gone_json(standing: Sequence[Standing], gone: Superfluous) -> dict[str, Any]:
    """Return the same as an object."""
    found = _of(standing, gone)
    return {
        "checkpoints": [_named(one) for one in found],
        "bytes": sum(one.size or 0 for one in found),
        "unfinished_objects": gone.unfinished,
    }


def _of(standing: Sequence[Standing], gone: Superfluous) -> list[Standing]:
    doomed = frozenset(gone.commits)
    return [one for one in standing if one.commit in doomed]


def _row(one: Standing) -> tuple[str, ...]:
    manifest = one.found.manifest
    told = ("-", "-", "-", "-")
    if manifest is not None:
        told = (str(len(manifest.pieces)), str(manifest.world), manifest.promise.level.value, manifest.why.value)
    return (
        str(one.commit.step),
        str(one.commit.generation),
        f"{one.found.committed_at:%Y-%m-%d %H:%M:%S}",
        format_size(one.size) if one.size is not None else "-",
        *told,
        ", ".join(_WORDS[mark] for mark in CheckpointMark if mark in one.marks),
    )


def _named(one: Standing) -> dict[str, Any]:
    return {"step": one.commit.step, "generation": one.commit.generation, "bytes": one.size}


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
