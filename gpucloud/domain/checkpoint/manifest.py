"""Checkpoints as keys: their grammar, the manifest that commits one, what to restore first and what may be deleted.

gen/000007.json                     an attempt's generation and the commit that it began from, written once
gen/000007.start.json               that an attempt of that generation, or a higher one, looks for where to begin
gen/000007.call.json                what node 0 of that attempt wants of the other nodes' own directories
data/000007/000001200/<name>        objects of generation 7 at step 1200
data/000007/000001200/files/<path>  the same of a script's own directory; node-00001/<path> where each node's counts
commit/000007/000001200.json        the manifest; once it exists, the checkpoint counts
best/000007/000001200.json          that it was the best so far by the script's own metric, and that metric
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from gpucloud.domain.checkpoint.objects import Sums, count_of, sums_of
from gpucloud.domain.untrusted import COUNTED, MOST_RANKS

LEAST_KEPT = 2
"""However few a job wants to keep: one may turn out damaged."""

_FORMAT = 6
_LONGEST_REASON = 1000

MOST_VALUES = 64 * 2**10
"""Bytes of JSON that a script's own values may have."""

_GENERATION_KEY = re.compile(r"gen/([0-9]{6,15})\.json")  # no number here comes to COUNTED
_STARTING_KEY = re.compile(r"gen/([0-9]{6,15})\.start\.json")
_CALL_KEY = re.compile(r"gen/([0-9]{6,15})\.call\.json")
_COMMIT_KEY = re.compile(r"commit/([0-9]{6,15})/([0-9]{9,15})\.json")
_BEST_KEY = re.compile(r"best/([0-9]{6,15})/([0-9]{9,15})\.json")
_DATA_KEY = re.compile(r"data/([0-9]{6,15})/([0-9]{9,15})/(?:(?:files|node-[0-9]{5})/[^\0]+|[^/.\0][^/\0]*)", re.DOTALL)
_MOST_CRC32 = 2**32 - 1
_LATEST_NS = 2**63 - 1  # in the year 2262; no file system tells of more


@dataclass(frozen=True, slots=True, order=True)
class Commit:
    """Names a checkpoint: the generation that wrote it, and the number of steps done."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One object of a checkpoint: its key under the prefix, its size and the CRC32 of each of its parts.

    `mtime_ns` is when a script wrote the file that it is, in nanoseconds since 1970; None where it is no file.
    """

    key: str
    size: int
    crc32: tuple[int, ...]
    mtime_ns: int | None = None

    @property
    def sums(self) -> Sums:
        """What its bytes are."""
        return Sums(size=self.size, crc32=self.crc32)

    def matches(self, data: bytes | memoryview) -> bool:
        """Whether these are the bytes that were written."""
        return sums_of((memoryview(data),)) == self.sums


class Level(str, Enum):
    """What a resume promises; the order is from the most to the least."""

    EXACT = "exact"  # bit for bit, given deterministic algorithms
    SAME_SAMPLES = "same_samples"  # the same global batches; sums are rounded in another order
    BEST_EFFORT = "best_effort"


@dataclass(frozen=True, slots=True)
class Promise:
    """What a resume promises, and in words what keeps it from being exact."""

    level: Level = Level.EXACT
    reason: str = ""

    def weaker(self, other: Promise) -> Promise:
        """Return the weaker of the two, this where they are alike."""
        order = list(Level).index
        return other if order(other.level) > order(self.level) else self


class Why(str, Enum):
    """What a checkpoint was saved for; the value is what programs read."""

    DUE = "due"  # its time had come, by the clock or by the count of steps
    NOTICE = "notice"  # a machine is to be interrupted
    BUDGET = "budget"  # the paid time comes to its end
    ASKED = "asked"  # the script asked for it
    STOP = "stop"  # somebody ended the job
    LAST = "last"  # the script came to its end
    TRIAL = "trial"  # a trial of resuming is on


class Counts(str, Enum):
    """What the number of a checkpoint counts; the value is what programs read."""

    STEPS = "steps"  # the script's own, told by the library or by the names of its files
    SAVES = "saves"  # of a script that saves by itself under names that tell no step

    def named(self, number: int) -> str:
        """Return "step 1200" or "save 12"."""
        return f"{'step' if self is Counts.STEPS else 'save'} {number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterDrop:
    """A counter of the script's own, its step or its epoch, that its first save has below what was put back."""

    saved: int
    put_back: int
    epochs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """What can be known of a checkpoint before anything of it is read: the epoch, from 0, and the script's own values.

    The epoch is that of the last batch, None where batches come from elsewhere. Values are what JSON has.
    """

    epoch: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict, hash=False)


NO_NOTES = Notes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A whole checkpoint: its objects, how many ranks wrote it and why, and what a resume from it can promise.

    `counts` says what the commit's number is of, `notes` what a script can know of it beforehand.
    """

    commit: Commit
    world: int
    promise: Promise
    pieces: tuple[Piece, ...]
    why: Why = Why.DUE
    counts: Counts = Counts.STEPS
    notes: Notes = NO_NOTES

    def __str__(self) -> str:
        """As people are told of it: by its number."""
        return self.counts.named(self.commit.step)


def generation_key(generation: int) -> str:
    """Return the key of a generation's record."""
    return f"gen/{generation:06d}.json"


def starting_key(generation: int) -> str:
    """Return the key that says that an attempt starts, which will have at least this generation."""
    return f"gen/{generation:06d}.start.json"


def starting(keys: Iterable[str]) -> tuple[int, ...]:
    """Return the least generations of the attempts that start, by the keys that say so."""
    return tuple(int(m[1]) for m in map(_STARTING_KEY.fullmatch, keys) if m)


def commit_key(commit: Commit) -> str:
    """Return the key of a manifest."""
    return f"commit/{commit.generation:06d}/{commit.step:09d}.json"


def best_key(commit: Commit) -> str:
    """Return the key that says that a checkpoint was the best so far."""
    return f"best/{commit.generation:06d}/{commit.step:09d}.json"


def data_key(commit: Commit, name: str) -> str:
    """Return the key of one of a checkpoint's objects."""
    return f"data/{commit.generation:06d}/{commit.step:09d}/{name}"


def generations(keys: Iterable[str]) -> tuple[int, ...]:
    """Return the generations among the keys, the newest first."""
    return tuple(sorted((int(m[1]) for m in map(_GENERATION_KEY.fullmatch, keys) if m), reverse=True))


def commits(keys: Iterable[str]) -> tuple[Commit, ...]:
    """Return the commits among the keys, the highest first."""
    found = (Commit(int(m[1]), int(m[2])) for m in map(_COMMIT_KEY.fullmatch, keys) if m)
    return tuple(sorted(found, reverse=True))


def restore_order(keys: Iterable[str], base_of: Callable[[int], Commit | None]) -> Iterator[Commit]:
    """Yield commits, the one to restore first: a generation's own, then its base, then those of the next older one.

    A generation's base comes before what an older generation committed later: that came from a writer which
    had been replaced. `base_of` is asked only when the generation's own commits are used up.
    """
    names = tuple(keys)
    there = _by_generation(commits(names))
    seen: set[Commit] = set()
    for generation in generations(names):
        for commit in _chain(generation, there, base_of):
            if commit not in seen:
                seen.add(commit)
                yield commit


def called_best(keys: Iterable[str]) -> frozenset[Commit]:
    """Return the checkpoints that were once the best so far, as far as they are there."""
    names = tuple(keys)
    found = (Commit(int(m[1]), int(m[2])) for m in map(_BEST_KEY.fullmatch, names) if m)
    return frozenset(found).intersection(commits(names))


def best_of(keys: Iterable[str], start: Commit | None, base_of: Callable[[int], Commit | None]) -> Commit | None:
    """Return the best checkpoint of those that led to `start`, or are it; None without one.

    Each that was called so was better than all before it. What an older generation committed after the next one had
    begun is none of them.
    """
    marked = called_best(keys)
    met: set[int] = set()
    while marked and start is not None and start.generation not in met:
        met.add(start.generation)
        own = [c for c in marked if c.generation == start.generation and c.step <= start.step]
        if own:
            return max(own)
        start = base_of(start.generation)
    return None


def collectable(
    keys: Iterable[str], *, generation: int, base: Commit | None, keep: int, best: Commit | None = None
) -> tuple[str, ...]:
    """Return the keys that generation's writer may delete, in the order to delete them: manifests before data.

    Kept are the first `keep` (at least two) checkpoints in the order of restoring, the base and the best always.
    Nothing may be deleted while a newer generation exists: its base could be among them.
    """
    names = tuple(keys)
    if any(newer > generation for newer in generations(names)):
        return ()
    there = commits(names)
    order = dict.fromkeys(_chain(generation, _by_generation(there), lambda _: base))
    order.update(dict.fromkeys(there))
    known = frozenset(there)
    present = [commit for commit in order if commit in known]
    kept = set(present[: max(keep, LEAST_KEPT)]) | {base, best}
    newest = max((c for c in there if c.generation == generation), default=Commit(generation, -1))
    doomed = [commit_key(commit) for commit in present if commit not in kept]
    data = [name for name, owner in data_of(names) if owner not in kept and owner < newest]
    calls = [name for name in names if (m := _CALL_KEY.fullmatch(name)) and int(m[1]) < generation]
    starts = [name for name in names if (m := _STARTING_KEY.fullmatch(name)) and int(m[1]) <= generation]
    marks = [best_key(commit) for commit in present if commit not in kept and best_key(commit) in names]
    return (*doomed, *data, *calls, *starts, *marks)


def commit_of(key: str) -> Commit | None:
    """Return the commit whose manifest lies under the key; None for any other key."""
    return next(iter(commits((key,))), None)


def data_of(keys: Iterable[str]) -> Iterator[tuple[str, Commit]]:
    """Yield the checkpoints' objects among the keys, each with the commit that it belongs to."""
    for name in keys:
        match = _DATA_KEY.fullmatch(name)
        if match:
            yield name, Commit(int(match[1]), int(match[2]))


class OtherFormat(ValueError):
    """Whole, and not of this version's format: no damage."""


def manifest_bytes(manifest: Manifest) -> bytes:
    """Return the manifest as sealed JSON."""
    pieces = [entry_of(piece) for piece in manifest.pieces]
    return seal(
        {
            "format": _FORMAT,
            "generation": manifest.commit.generation,
            "step": manifest.commit.step,
            "world": manifest.world,
            "level": manifest.promise.level.value,
            "reason": manifest.promise.reason[:_LONGEST_REASON],
            "why": manifest.why.value,
            "counts": manifest.counts.value,
            **notes_entry(manifest.notes),
            "pieces": pieces,
        }
    )


def read_manifest(data: bytes) -> Manifest:
    """Return the manifest; ValueError when the bytes are not one, whole and unchanged.

    OtherFormat for one that is both, and that another gpucloud wrote.
    """
    body = unseal(data)
    try:
        if type(body["format"]) is not int or body["format"] != _FORMAT:
            raise OtherFormat(f"it is of format {str(body['format'])[:20]!r}, and this gpucloud reads {_FORMAT}")
        return Manifest(
            commit=Commit(counted(body["generation"]), counted(body["step"])),
            world=counted(body["world"], least=1, most=MOST_RANKS),
            promise=Promise(Level(body["level"]), _text(body["reason"])),
            pieces=tuple(piece_of(piece) for piece in listed(body["pieces"])),
            why=Why(body["why"]),
            counts=Counts(body["counts"]),
            notes=read_notes(body),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a manifest: {error!r}") from error


def notes_entry(notes: Notes) -> dict[str, Any]:
    """Return the notes as JSON."""
    return {"epoch": notes.epoch, "values": dict(notes.values)}


def read_notes(body: Mapping[str, Any]) -> Notes:
    """Return what `notes_entry` was given; ValueError or KeyError for anything else."""
    epoch, values = body["epoch"], body["values"]
    if not isinstance(values, dict) or len(json.dumps(values)) > MOST_VALUES:
        raise ValueError("not values that can be")
    return Notes(epoch=None if epoch is None else counted(epoch), values=values)


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST_REASON:
        raise ValueError("not a text that can be")
    return value


def generation_bytes(*, base: Commit | None, owner: str, attempt: int = 0) -> bytes:
    """Return a generation's record; `owner` must tell this writer from every other."""
    named = [base.generation, base.step] if base else None
    return seal({"base": named, "owner": owner, "attempt": attempt})


def read_base(data: bytes) -> Commit | None:
    """Return the commit that a generation began from; ValueError when the record is damaged."""
    body = unseal(data)
    try:
        if body["base"] is None:
            return None
        generation, step = listed(body["base"])
        return Commit(counted(generation), counted(step))
    except KeyError as error:
        raise ValueError(f"not a generation's record: {error!r}") from error


def read_attempt(data: bytes) -> int | None:
    """Return the attempt that a generation is of, None where nobody said; ValueError when the record is damaged."""
    attempt = unseal(data).get("attempt")
    return None if attempt is None else counted(attempt)


def best_bytes(metric: float) -> bytes:
    """Return what says how good a checkpoint is, by the script's own metric, of which more is better."""
    return seal({"metric": metric})


def read_best(data: bytes) -> float:
    """Return what `best_bytes` was given; ValueError for anything else."""
    metric = unseal(data).get("metric")
    if not isinstance(metric, (int, float)) or isinstance(metric, bool) or not math.isfinite(metric):
        raise ValueError("not a metric that can be")
    return float(metric)


def seal(body: dict[str, Any]) -> bytes:
    """Return JSON that carries the hash of its own body, so that one changed bit is noticed."""
    text = json.dumps(body, sort_keys=True)
    return json.dumps({"body": body, "sha256": hashlib.sha256(text.encode()).hexdigest()}, sort_keys=True).encode()


def unseal(data: bytes) -> dict[str, Any]:
    """Return what `seal` was given; ValueError when the bytes are not exactly what it returned."""
    try:
        sealed = json.loads(data)
        body = sealed.get("body") if isinstance(sealed, dict) else None
        if not isinstance(body, dict) or seal(body) != data:
            raise ValueError("damaged")
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return body


def counted(value: object, *, least: int = 0, most: int = COUNTED - 1) -> int:
    """Return a number of sealed JSON; ValueError for what is none, or counts further than any job does."""
    if type(value) is not int or not least <= value <= most:  # `type`, because a bool is an int to isinstance
        raise ValueError("not a number that can be")
    return value


def listed(value: object) -> list[Any]:
    """Return a list of sealed JSON; ValueError for what is none."""
    if not isinstance(value, list):
        raise ValueError("not a list")  # noqa: TRY004  it is the record that is wrong
    return value


def entry_of(piece: Piece) -> dict[str, Any]:
    """Return the piece as JSON."""
    written = {} if piece.mtime_ns is None else {"mtime_ns": piece.mtime_ns}
    return {"key": piece.key, "size": piece.size, "crc32": list(piece.crc32), **written}


def piece_of(entry: dict[str, Any]) -> Piece:
    """Return what `entry_of` was given; ValueError, KeyError or TypeError for anything else."""
    key, size = entry["key"], counted(entry["size"])
    crc32 = tuple(counted(value, most=_MOST_CRC32) for value in listed(entry["crc32"]))
    if not _DATA_KEY.fullmatch(key):
        raise ValueError("an object lies elsewhere than checkpoints do")
    if len(crc32) != count_of(size):
        raise ValueError("an object has another number of sums than parts")
    mtime_ns = counted(entry["mtime_ns"], most=_LATEST_NS) if "mtime_ns" in entry else None
    return Piece(key=key, size=size, crc32=crc32, mtime_ns=mtime_ns)


def _by_generation(there: Iterable[Commit]) -> Mapping[int, list[Commit]]:
    found: dict[int, list[Commit]] = {}
    for commit in there:
        found.setdefault(commit.generation, []).append(commit)
    return found


def _chain(
    generation: int, there: Mapping[int, list[Commit]], base_of: Callable[[int], Commit | None]
) -> Iterator[Commit]:
    yield from there.get(generation, ())
    base = base_of(generation)
    if base is not None:
        yield base
