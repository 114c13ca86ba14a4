"""A checkpoint that several nodes write: what node 0 calls for, what each other node answers, when it is whole. Pure.

gen/000007.call.json                        the newest call of that generation, written again and again
data/000007/000001200/node-00001/<path>     a node's files
data/000007/000001200/node-00001.json       its answer, once they are all there
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from gpucloud.domain.checkpoint.directory import FileSet, Listing, Signature, below, family, folder_of, last_number
from gpucloud.domain.checkpoint.layouts import METADATA, RANK_STATE, Found, Rule, is_last, layout_of
from gpucloud.domain.checkpoint.manifest import (
    Commit,
    Piece,
    counted,
    data_key,
    entry_of,
    listed,
    piece_of,
    seal,
    unseal,
)
from gpucloud.domain.job.spec import Layout

_SHARD = re.compile(rb"__\d+_\d+\.distcp")
_OPTIMIZER = "_optim_states.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Node 0 has a whole folder of that step, with these paths, and wants the others' parts of it.

    `over`: it wants nothing more; its script has ended and its last commit is made.
    """

    step: int = 0
    folder: str = ""
    paths: tuple[str, ...] = ()
    over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A node's part of what was called for; `pieces` is None when it has none that is whole, and will have none."""

    node: int
    pieces: tuple[Piece, ...] | None


class Round(Enum):
    """How it stands with one call."""

    OPEN = "open"
    WHOLE = "whole"
    VOID = "void"


def round_of(nodes: int, answers: Mapping[int, Answer]) -> Round:
    """Return how it stands after these answers of nodes 1 and up."""
    if any(answer.pieces is None for answer in answers.values()):
        return Round.VOID
    return Round.WHOLE if set(range(1, nodes)) <= answers.keys() else Round.OPEN


def share_of(rule: Rule, call: Call, listing: Listing) -> FileSet:
    """Return what this node has of the folder that is called for; a part may have no file at all.

    Node 0's marker is written when every rank has written, so that a call says: it is all there by now. Where a
    program gives no such promise, what the node's own ranks must have written is looked for. `complete` is left to
    the settle time where files are about to be deleted again.
    """
    paths = below(call.folder, listing) if call.folder else ()
    return FileSet(
        name=call.folder, step=call.step, paths=paths, complete=_is_complete(rule, call, paths, listing), marked=True
    )


def is_superseded(call: Call, listing: Listing) -> bool:
    """Whether this node's script has gone on to a newer folder: nothing more will be written for the call."""
    kind = (folder_of(call.folder), family(call.folder.rpartition("/")[2]))
    folders = {"/".join(path.split("/")[:n]) for path in listing for n in range(1, path.count("/") + 1)}
    same = [name for name in folders if (folder_of(name), family(name.rpartition("/")[2])) == kind]
    return any((last_number(name) or 0) > call.step for name in same)


def to_call_for(found: Found, *, done: int, base: int | None) -> Found:
    """Return the sets of node 0 that can be called for: folders that tell their step, above `done` in this attempt.

    Not that of the step which was put back, written again: other nodes' old files lie in it too.
    """
    told = [one for one in found.sets if one.step is not None and one.name]
    if found.sets and not told:
        return Found(
            unclear="with per_node each checkpoint is a folder of its own whose name ends with the step, as step-500: "
            "by it nodes tell what belongs together"
        )
    sets = tuple(one for one in told if (one.step or 0) > done and one.step != base)
    return Found(sets=sets, unclear=found.unclear)


def shards_missing(metadata: bytes, names: Collection[str]) -> tuple[str, ...]:
    """Return the files that a torch.distributed.checkpoint names and that are not among `names`.

    Its `.metadata` is a pickle, which is searched for the names and never loaded.
    """
    named = {match.decode() for match in _SHARD.findall(metadata)}
    return tuple(sorted(named - set(names)))


def call_key(generation: int) -> str:
    """Return the key of a generation's newest call."""
    return f"gen/{generation:06d}.call.json"


def answer_key(commit: Commit, node: int) -> str:
    """Return the key of a node's answer."""
    return data_key(commit, f"node-{node:05d}.json")


def call_bytes(call: Call) -> bytes:
    """Return the call as sealed JSON."""
    return seal({"step": call.step, "folder": call.folder, "paths": list(call.paths), "over": call.over})


def read_call(data: bytes) -> Call:
    """Return the call; ValueError when the bytes are none."""
    body = unseal(data)
    try:
        step, folder, paths, over = counted(body["step"]), body["folder"], listed(body["paths"]), body["over"]
    except KeyError as error:
        raise ValueError(f"not a call: {error!r}") from error
    if not isinstance(over, bool) or not all(isinstance(text, str) for text in (folder, *paths)):
        raise ValueError("not a call: a text or a word that is none")
    return Call(step=step, folder=folder, paths=tuple(paths), over=over)


def answer_bytes(answer: Answer) -> bytes:
    """Return the answer as sealed JSON."""
    pieces = None if answer.pieces is None else [entry_of(piece) for piece in answer.pieces]
    return seal({"node": answer.node, "pieces": pieces})


def read_answer(data: bytes, commit: Commit, node: int) -> Answer:
    """Return that node's answer; ValueError when the bytes are none, or name another's objects."""
    body = unseal(data)
    try:
        if counted(body["node"]) != node:
            raise ValueError(f"the answer of node {body['node']!r}")
        pieces = None if body["pieces"] is None else tuple(piece_of(entry) for entry in listed(body["pieces"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"not an answer: {error!r}") from error
    own = data_key(commit, f"node-{node:05d}/")
    if not all(piece.key.startswith(own) for piece in pieces or ()):
        raise ValueError("the answer names another's objects")
    return Answer(node=node, pieces=pieces)


def _is_complete(rule: Rule, call: Call, paths: tuple[str, ...], listing: Listing) -> bool:
    if rule.done_file is not None:
        marker = f"{call.folder}/{rule.done_file}"
        return marker in listing and is_last(marker, paths, listing)
    layout = rule.layout if rule.layout is not Layout.AUTO else layout_of(dict.fromkeys(call.paths, Signature(0, 0, 0)))
    match layout:
        case Layout.DCP | Layout.MEGATRON:
            return True
        case Layout.HF:
            return not _states(call.paths) or set(rule.own_ranks) <= _states(paths)
        case Layout.DEEPSPEED:
            return _shards(paths) >= _shards(path for path in call.paths if path.startswith(f"{call.folder}/"))
        case Layout.LIGHTNING | Layout.FILE | Layout.AUTO:
            return False


def _states(paths: Iterable[str]) -> set[int]:
    names = (path.rpartition("/")[2] for path in paths)
    return {int(m[1]) for m in map(RANK_STATE.fullmatch, names) if m}


def _shards(paths: Iterable[str]) -> int:
    """Every node has as many ranks, and each rank writes its part of the optimizer."""
    return sum(path.endswith(_OPTIMIZER) for path in paths)


def metadata_among(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the paths that name what else belongs to their folder."""
    return tuple(path for path in paths if path.rpartition("/")[2] == METADATA)
