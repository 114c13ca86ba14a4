"""A job as two short ones, and what their checkpoints hold compared step by step."""

from __future__ import annotations

import json
import secrets
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gpucloud.domain.checkpoint.chunks import OWN, Chunk, chunks_of, rank_of
from gpucloud.domain.checkpoint.manifest import Commit, Manifest, Piece, generations
from gpucloud.domain.checkpoint.objects import Header
from gpucloud.domain.checkpoint.protection import (
    LOSSES,
    Content,
    Losses,
    Trial,
    Verdict,
    differences,
    first_gap,
    judged,
)
from gpucloud.domain.checkpoint.standing import Standing
from gpucloud.domain.errors import StoreError, UsageError
from gpucloud.domain.job.spec import CheckpointPolicy, Job
from gpucloud.store.checkpoints import base_of
from gpucloud.store.parts import all_done
from gpucloud.usecases.checkpoint.checkpoints import Part, StoredCheckpoints, parts_of


def compared(calm: StoredCheckpoints, killed: StoredCheckpoints) -> Verdict:
    """Return how the checkpoints of a killed run differ from those of an undisturbed one, from the first step on.

    StoreError when one is damaged, or their last steps are not the same.
    """
    resumed_from = _base(killed)
    ours, theirs = _by_step(calm.standing()), _by_step(killed.standing())
    if not ours or not theirs or max(ours) != max(theirs):
        last = [f"step {max(steps)}" if steps else "no checkpoint" for steps in (ours, theirs)]
        raise StoreError(f"the runs ended at {last[0]} and {last[1]}", hint="gpucloud logs of both runs tells why")
    step, count = 0, 0
    parts: tuple[str, ...] = ()
    for step in sorted(ours.keys() & theirs.keys()):
        one, other = content(calm, ours[step]), content(killed, theirs[step])
        count, parts = len(one.parts), differences(one, other)
        if parts:
            break
    gap = first_gap(losses(calm, ours[max(ours)]), losses(killed, theirs[max(theirs)]))
    return Verdict(
        outcome=judged(step, parts, gap, resumed_from),
        step=step,
        resumed_from=resumed_from.step if resumed_from else None,
        compared=count,
        parts=parts if resumed_from else (),
        loss=gap if resumed_from else None,
    )


def content(stored_checkpoints: StoredCheckpoints, manifest: Manifest) -> Content:
    """Return what the checkpoint holds; StoreError when it is damaged."""
    try:
        found = all_done(lambda piece: dict(_parts(stored_checkpoints, piece)), manifest.pieces)
    except ValueError as error:
        raise _damaged(manifest, error) from error
    return Content(parts={name: value for one in found for name, value in one.items()})


def losses(stored_checkpoints: StoredCheckpoints, manifest: Manifest) -> Losses:
    """Return the losses of all steps that the checkpoint of a trial tells of; StoreError when it is damaged."""
    try:
        headers = all_done(stored_checkpoints.header, manifest.pieces)
        trees = [_tree(header, "own") for header in headers]
    except ValueError as error:
        raise _damaged(manifest, error) from error
    return {rank_of(piece.key): tree.get(LOSSES, []) for piece, tree in zip(manifest.pieces, trees, strict=True)}


def _damaged(manifest: Manifest, error: ValueError) -> StoreError:
    return StoreError(f"the checkpoint of step {manifest.commit.step} is damaged: {error}")


def _by_step(standing: tuple[Standing, ...]) -> dict[int, Manifest]:
    """Return the manifest that a restore tries first of each step."""
    return {one.commit.step: one.sound for one in reversed(standing) if one.sound is not None}


def _base(stored_checkpoints: StoredCheckpoints) -> Commit | None:
    newest = generations(stored_checkpoints.listed())[:1]
    return base_of(stored_checkpoints.store, stored_checkpoints.prefix, newest[0]) if newest else None


def _parts(stored_checkpoints: StoredCheckpoints, piece: Piece) -> Iterator[tuple[str, str]]:
    """Yield the name of each tensor and of each other value in an object, with what tells it from another."""
    header, rank = stored_checkpoints.header(piece), rank_of(piece.key)
    for chunk, crc in _summed(stored_checkpoints, piece, header):
        box = "" if chunk.extent == chunk.shape else f" from {list(chunk.offset)} on"
        yield _named(chunk.of, rank) + box, f"{chunk.dtype} {chunk.extent} {crc:08x}"
    for tree in ("shared", "own"):
        start = OWN[:-1] if tree == "own" else ""
        found = _tree(header, tree)
        found.pop(LOSSES, None)  # compared by themselves
        found.pop("given", None)  # a script may make its optimizer by what it resumes
        for name, leaf in _leaves(found, start):
            yield _named(name, rank), json.dumps(leaf)


def _tree(header: Header, name: str) -> dict[str, Any]:
    """Return what an object says of that name; ValueError when it is no JSON object."""
    try:
        found = json.loads(header.metadata.get(name, "{}"))
    except RecursionError as error:
        raise ValueError(f"{name} is nested too deeply") from error
    if isinstance(found, dict):
        return found
    raise ValueError(f"{name} is not an object")


def _summed(stored_checkpoints: StoredCheckpoints, piece: Piece, header: Header) -> list[tuple[Chunk, int]]:
    """Return the tensors of an object with the CRC32 of each one's bytes."""
    chunks = chunks_of(0, header)
    sums = dict.fromkeys(range(len(chunks)), 0)

    def take(part: Part, data: memoryview) -> None:
        for number, chunk in enumerate(chunks):
            first, last = max(chunk.begin - part.at, 0), min(chunk.end - part.at, part.length)
            if first < last:
                sums[number] = zlib.crc32(data[first:last], sums[number])

    for part in parts_of((piece,)):  # in order: sums go on from part to part
        damages = stored_checkpoints.read((part,), take)
        if damages:
            raise ValueError(str(damages[0]))
    return [(chunk, sums[number]) for number, chunk in enumerate(chunks)]


def _named(name: str, rank: int) -> str:
    """What is a rank's own is named so; the rest belongs to all."""
    return f"rank {rank}: {name.removeprefix(OWN)}" if name.startswith(OWN) else name


def _leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield what is no tensor and has nothing below it."""
    if isinstance(tree, dict) and tree.get("$") == "tensor":
        return
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else None
    if items is None:
        yield name, tree
    else:
        for key, item in items:
            yield from _leaves(item, f"{name}.{key}" if name else str(key))


# A job as two short ones, to see whether its script resumes to the bit.


STEPS = 8
LEAST_STEPS = 4
"""Fewer have no step that is saved, one that is lost and one that comes after both."""

MOST_STEPS = 1000

_EVERY = 2
_LONGEST_NAME = 40


def two_jobs(job: Job, steps: int, token: str = "") -> tuple[Job, Job]:
    """Return the job as two short ones, each with half its budget: undisturbed, and killed after a middle step."""
    if not LEAST_STEPS <= steps <= MOST_STEPS:
        raise UsageError(
            f"{steps} steps prove nothing: from {LEAST_STEPS} to {MOST_STEPS}", hint=f"--verify-steps {STEPS}"
        )
    token = token or secrets.token_hex(2)
    checkpoint = CheckpointPolicy(every_steps=_EVERY, keep=steps)
    resources = replace(job.resources, least_nodes=0)  # bits are those of one number of nodes
    plain = replace(
        job, budget_usd=job.budget_usd / 2, outputs=(), checkpoint=checkpoint, idle=None, resources=resources
    )
    # An odd step: the one before was saved, and this one is lost.
    trials = ("calm", Trial(steps=steps)), ("killed", Trial(steps=steps, killed_at=steps // 2 | 1))
    calm, killed = (replace(plain, name=_name(job.name, f"{token}-{word}"), trial=str(trial)) for word, trial in trials)
    return calm, killed


def _name(job: str, end: str) -> str:
    return f"{job[: _LONGEST_NAME - len(end) - 1].rstrip('-')}-{end}"
