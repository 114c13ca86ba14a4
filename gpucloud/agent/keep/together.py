"""Takes the parts of several nodes for one checkpoint: node 0 calls for them and commits, the others answer.

Both speak through the store alone, in objects that are written whole: whoever dies at any moment leaves a call without
an answer, or an answer without a commit, which count for nothing.
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

from gpucloud.agent.keep.depot import Depot
from gpucloud.agent.keep.taking import Say, Taking, Took
from gpucloud.domain.errors import CredentialsError, StoreError
from gpucloud.domain.keeping.keys import PROMISE, paths_of
from gpucloud.domain.keeping.layouts import Found, Rule, find_sets
from gpucloud.domain.keeping.listing import FileSet, Listing
from gpucloud.domain.keeping.rounds import (
    Answer,
    Call,
    Round,
    answer_bytes,
    answer_key,
    call_bytes,
    call_key,
    is_superseded,
    read_answer,
    read_call,
    round_of,
    share_of,
    to_call_for,
)
from gpucloud.domain.manifest import Commit, Manifest, Piece, Why
from gpucloud.store import Conflict

_JOIN_AGAIN_S = 10.0
_ASK_S = 1.0  # 3,600 GETs are 0.14 cents in S3


class Calling(Taking):
    """Node 0: a set of its own is committed with the parts of all the others."""

    def __init__(self, depot: Depot, copies: Path, rule: Rule, say: Say, *, base: Commit | None) -> None:
        super().__init__(depot, copies, rule, say, base=base)
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
        self._done = commit.step
        return Took.SAVED if flaw is None else Took.VOID

    def _call(self, call: Call) -> None:
        self._depot.put(call_key(self._generation), call_bytes(call))

    def _answers(self, commit: Commit) -> dict[int, Answer]:
        """Return the answers once all are there, one says that there will be none, or the time is up."""
        found: dict[int, Answer] = {}
        while True:
            for node in set(range(1, self._rule.nodes)) - found.keys():
                data = self._depot.get(answer_key(commit, node))
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

    def __init__(self, depot: Depot, copies: Path, rule: Rule, say: Say, *, attempt: int) -> None:
        super().__init__(depot, copies, rule, say)
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
                data = self._depot.get(call_key(self._generation))
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
            self._depot.put(answer_key(commit, self._rule.node), data, if_absent=True)
        except Conflict:
            self._say(f"step {commit.step} was handed in before")
        self._done = max(self._done, commit.step)


def _answer(data: bytes, commit: Commit, node: int) -> Answer:
    try:
        return read_answer(data, commit, node)
    except ValueError:
        return Answer(node=node, pieces=None)
