"""Commits one set of a script's files, of one node or several: copied, judged, uploaded, the manifest last."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from enum import Enum
from pathlib import Path

from gpucloud.agent.scripts.counters import counters_of
from gpucloud.agent.scripts.script import CheckpointLocation, Texts, copy, is_whole, put_time
from gpucloud.domain.checkpoint.directory import (
    PROMISE,
    FileSet,
    Listing,
    Signature,
    Unsaved,
    above,
    beside,
    folder_of,
    inside,
    object_name,
    paths_of,
    with_pointers,
)
from gpucloud.domain.checkpoint.layouts import Counters, Found, Rule, checkpoints_of, find_sets
from gpucloud.domain.checkpoint.manifest import Commit, Counts, Manifest, Piece, Why
from gpucloud.domain.checkpoint.rounds import (
    Answer,
    Call,
    Round,
    answer_bytes,
    answer_key,
    call_bytes,
    call_key,
    is_superseded,
    metadata_among,
    read_answer,
    read_call,
    round_of,
    shards_missing,
    share_of,
    to_call_for,
)
from gpucloud.domain.errors import CredentialsError, StoreError
from gpucloud.store import Conflict

_WRITERS = 4
Content = tuple[tuple[str, Signature], ...]
Say = Callable[[str], None]


class Took(Enum):
    """What became of a set."""

    SAVED = "saved"
    CHANGED = "changed"  # or torn: it is looked at again
    VOID = "void"  # it will never be whole


class Taking:
    """This attempt's commits; `committed` is the newest number in the store, of what `counts` says.

    `longest_s` is what one took.
    """

    def __init__(
        self, location: CheckpointLocation, copies: Path, rule: Rule, say: Say, *, base: Commit | None = None
    ) -> None:
        self.committed = base.step if base else 0
        self.counts = Counts.STEPS
        self.longest_s = 0.0
        self.count = 0
        self.over: bool | None = None
        """Whether another node wants nothing more of this one; None where that is no other node's matter."""
        self.first: dict[str, Counters] = {}
        """What the files of the first save tell by themselves, where their names tell no step."""
        self.not_taken: Unsaved | None = None
        """Why the set that was VOID last is not saved."""
        self._location = location
        self._checkpoints = location.checkpoints
        self._copies = copies
        self._rule = rule
        self._say = say
        self._newest: int | None = None
        self._texts = Texts()

    def sets(self, directory: Path, listing: Listing) -> Found:
        """Return what may be taken, once it is complete and at rest. May raise StoreError."""
        return self.there(directory, listing)

    def there(self, directory: Path, listing: Listing) -> Found:
        """Return the checkpoints in the directory, with what beside them names them and what they name."""
        found = find_sets(self._rule, listing)
        checkpoints = checkpoints_of(found.sets, listing)
        near = (*beside(found.sets, listing, checkpoints), *inside(found.sets, listing))
        texts = self._texts.of(directory, near, listing)
        return replace(found, sets=tuple(with_pointers(one, texts, listing, checkpoints) for one in found.sets))

    def take(self, directory: Path, one: FileSet, content: Content, *, proven: bool, why: Why = Why.DUE) -> Took:
        """Return SAVED when the set is in the store; CHANGED when it changed meanwhile, or one of its files is torn.

        With `proven`, every file must show by its form that it is whole: whoever wrote it may have died while writing.
        Raises StoreError, Fenced when another attempt took over, OSError for a full disk.
        """
        began = time.monotonic()
        shutil.rmtree(self._copies, ignore_errors=True)
        try:
            if not copy(directory, content, self._copies) or not self._is_whole(one, proven=proven):
                return Took.CHANGED
            took = self._save(one, why)
            if took is Took.SAVED and self.count == 0 and one.step is None:
                self.first = counters_of(self._copies, one.paths)
        finally:
            shutil.rmtree(self._copies, ignore_errors=True)
        if took is Took.SAVED:
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            self.count += 1
        return took

    def close_by(self, limit_s: float) -> None:
        """Wait for no other node beyond this moment of the monotonic clock."""

    def close(self) -> None:
        """Nothing more will be taken."""

    @property
    def _generation(self) -> int:
        return self._checkpoints.generation

    def _is_whole(self, one: FileSet, *, proven: bool) -> bool:
        found = [is_whole(self._copies / path) for path in one.paths]
        return all(found) if proven and not one.marked else False not in found

    def _save(self, one: FileSet, why: Why) -> Took:
        if self._lacking(one, one.paths):
            return Took.CHANGED
        number, counts = self._number(one)
        commit = Commit(self._generation, number)
        self._commit(commit, self._uploaded(commit, (*one.paths, *self._beside(one))), why, counts)
        return Took.SAVED

    def _beside(self, one: FileSet) -> tuple[str, ...]:
        """Return the paths of what is kept with the set, without what is torn: no part of it, that bars no save."""
        for pointer in one.pointers:  # as it was when the set was found: some are written again and again
            (self._copies / pointer.path).parent.mkdir(parents=True, exist_ok=True)
            (self._copies / pointer.path).write_bytes(pointer.text.encode())
            put_time(self._copies / pointer.path, pointer.mtime_ns)
        torn = {path for path in one.also if is_whole(self._copies / path) is False}
        # What names nothing that is kept would lead a script to nothing.
        lost = {top for path in torn for top in (*above(path), path)}
        pointers = (pointer.path for pointer in one.pointers if not lost.issuperset(pointer.names))
        return (*(path for path in one.also if path not in torn), *pointers)

    def _lacking(self, one: FileSet, there: Iterable[str]) -> tuple[str, ...]:
        """Return the files that a torch.distributed.checkpoint among the copies names and that are not `there`."""
        names: dict[str, set[str]] = {}
        for path in there:
            names.setdefault(folder_of(path), set()).add(path.rpartition("/")[2])
        return tuple(
            name
            for path in metadata_among(one.paths)
            for name in shards_missing((self._copies / path).read_bytes(), names.get(folder_of(path), ()))
        )

    def _commit(self, commit: Commit, pieces: tuple[Piece, ...], why: Why, counts: Counts = Counts.STEPS) -> None:
        world = self._rule.nodes * self._rule.ranks
        manifest = Manifest(commit=commit, world=world, promise=PROMISE, pieces=pieces, why=why, counts=counts)
        self._checkpoints.commit(manifest)
        self.committed = self._newest = commit.step
        self.counts = counts
        self._checkpoints.collect()

    def _number(self, one: FileSet) -> tuple[int, Counts]:
        """Return the step that the names say, unless that would not be the newest; else which save it is."""
        if one.step is not None and (self._newest is None or one.step > self._newest):
            return one.step, Counts.STEPS
        return self.committed + 1, Counts.SAVES

    def _uploaded(self, commit: Commit, paths: tuple[str, ...], node: int | None = None) -> tuple[Piece, ...]:
        with ThreadPoolExecutor(_WRITERS) as pool:
            return tuple(pool.map(lambda path: self._upload(commit, path, node), paths))

    def _upload(self, commit: Commit, path: str, node: int | None) -> Piece:
        # The copy is ours alone: a file that its script cuts short while it is mapped would end this process.
        with (self._copies / path).open("rb") as file, ExitStack() as stack:
            view = memoryview(b"")
            if file.seek(0, 2):
                mapped = stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
                view = stack.enter_context(memoryview(mapped))
            piece = self._checkpoints.upload(commit, object_name(path, node), view)
            # Before 1970 is what an archive without times unpacks to.
            return replace(piece, mtime_ns=max(0, os.fstat(file.fileno()).st_mtime_ns))


# Takes the parts of several nodes for one checkpoint: node 0 calls for them and commits, the others answer.
#
# Both speak through the store alone, in objects that are written whole: whoever dies at any moment leaves a call
# without an answer, or an answer without a commit, which count for nothing.


_JOIN_AGAIN_S = 10.0
_ASK_S = 1.0  # 3,600 GETs are 0.14 cents in S3


class Calling(Taking):
    """Node 0: a set of its own is committed with the parts of all the others."""

    def __init__(
        self, location: CheckpointLocation, copies: Path, rule: Rule, say: Say, *, base: Commit | None
    ) -> None:
        super().__init__(location, copies, rule, say, base=base)
        self._base = base.step if base else None
        self._done = -1
        self._limit_s = float("inf")

    def sets(self, directory: Path, listing: Listing) -> Found:
        """Return the folders that are above the newest step which the nodes were called for."""
        return to_call_for(super().sets(directory, listing), done=self._done, base=self._base)

    def close_by(self, limit_s: float) -> None:
        """Wait for no answer beyond this moment of the monotonic clock."""
        self._limit_s = limit_s

    def close(self) -> None:
        """Tell the others that nothing more is wanted of them. May raise StoreError."""
        self._call(Call(over=True))

    def _save(self, one: FileSet, why: Why) -> Took:
        commit = Commit(self._generation, one.step or 0)
        self._call(Call(step=commit.step, folder=one.name, paths=one.paths))
        own = self._uploaded(commit, (*one.paths, *self._beside(one)), node=0)
        answers = self._answers(commit)
        pieces = (*own, *(piece for answer in answers.values() for piece in answer.pieces or ()))
        flaw = self._why_not(one, commit, pieces, answers)
        if flaw is None:
            self._commit(commit, pieces, why)
        else:
            self._say(f"the checkpoint of step {commit.step} is passed over: {flaw}")
            is_late = round_of(self._rule.nodes, answers) is Round.OPEN  # what a node did not hand in may be whole
            self.not_taken = Unsaved(why=flaw, paths=one.paths if is_late else ())
        self._done = commit.step
        return Took.SAVED if flaw is None else Took.VOID

    def _call(self, call: Call) -> None:
        self._location.put(call_key(self._generation), call_bytes(call))

    def _answers(self, commit: Commit) -> dict[int, Answer]:
        """Return the answers once all are there, one says that there will be none, or the time is up."""
        found: dict[int, Answer] = {}
        while True:
            for node in set(range(1, self._rule.nodes)) - found.keys():
                data = self._location.get(answer_key(commit, node))
                if data is not None:
                    found[node] = _answer(data, commit, node)
            if round_of(self._rule.nodes, found) is not Round.OPEN or time.monotonic() >= self._limit_s:
                return dict(sorted(found.items()))
            time.sleep(_ASK_S)

    def _why_not(
        self, one: FileSet, commit: Commit, pieces: tuple[Piece, ...], answers: dict[int, Answer]
    ) -> str | None:
        match round_of(self._rule.nodes, answers):
            case Round.VOID:
                without = next(node for node, answer in answers.items() if answer.pieces is None)
                return f"node {without} has no whole part of it"
            case Round.OPEN:
                missing = min(set(range(1, self._rule.nodes)) - answers.keys())
                return f"node {missing} did not hand in its part in time"
            case Round.WHOLE:
                paths = paths_of(Manifest(commit=commit, world=1, promise=PROMISE, pieces=pieces))
                if paths is None:
                    return "what the nodes handed in are no files of a directory"
                lacking = self._lacking(one, paths)
                return f"no node handed in {lacking[0]}" if lacking else None


class Answering(Taking):
    """Any other node: what node 0 calls for is handed in, or said to be missing."""

    def __init__(self, location: CheckpointLocation, copies: Path, rule: Rule, say: Say, *, attempt: int) -> None:
        super().__init__(location, copies, rule, say)
        self._attempt = attempt
        self.over = False
        self._call: Call | None = None
        self._trouble: StoreError | CredentialsError | None = None
        self._done = -1
        threading.Thread(target=self._listen, daemon=True).start()

    def there(self, _directory: Path, listing: Listing) -> Found:
        """Return the checkpoints as node 0 calls for them."""
        return find_sets(self._rule, listing)

    def sets(self, _directory: Path, listing: Listing) -> Found:
        """Return this node's part of what is called for now, if it has files. Raises StoreError, CredentialsError."""
        if self._trouble is not None:
            raise self._trouble
        call = self._call
        if call is None or call.over or call.step <= self._done:
            return Found()
        share = share_of(self._rule, call, listing)
        if share.paths and (share.complete or not is_superseded(call, listing)):
            return Found(sets=(share,))
        if share.complete or is_superseded(call, listing):
            self._hand_in(Commit(self._generation, call.step), () if share.complete else None)
        return Found()

    def _save(self, one: FileSet, _why: Why) -> Took:
        commit = Commit(self._generation, one.step or 0)
        self._hand_in(commit, self._uploaded(commit, one.paths, self._rule.node))
        return Took.SAVED

    def _listen(self) -> None:
        """Hear every call, in a thread of its own: a store that hangs must not keep the script from being asked."""
        join_at_s = time.monotonic() + _JOIN_AGAIN_S
        while not self.over:
            try:
                data = self._location.get(call_key(self._generation))
                if data is not None:
                    self._heard(data)
                elif time.monotonic() >= join_at_s:
                    # Where a store ignores conditions, node 0 leaves the generation that it took first.
                    join_at_s = time.monotonic() + _JOIN_AGAIN_S
                    self._checkpoints.join(self._attempt)
                self._trouble = None
            except (StoreError, CredentialsError) as error:
                self._trouble = error
            time.sleep(_ASK_S)

    def _heard(self, data: bytes) -> None:
        with contextlib.suppress(ValueError):  # it is written again, or the attempt ends without it
            self._call = read_call(data)
            self.over = self._call.over

    def _hand_in(self, commit: Commit, pieces: tuple[Piece, ...] | None) -> None:
        data = answer_bytes(Answer(node=self._rule.node, pieces=pieces))
        try:
            self._location.put(answer_key(commit, self._rule.node), data, if_absent=True)
        except Conflict:
            self._say(f"step {commit.step} was handed in before")
        self._done = max(self._done, commit.step)


def _answer(data: bytes, commit: Commit, node: int) -> Answer:
    try:
        return read_answer(data, commit, node)
    except ValueError:
        return Answer(node=node, pieces=None)
