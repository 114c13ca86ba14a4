"""Asking others about machines that do not answer us: their peers, and the training itself."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from gpucloud.domain.errors import NodeError
from gpucloud.domain.node import Node
from gpucloud.domain.supervision.membership import is_gone, progress_of
from gpucloud.domain.supervision.seen import NodeSeen, Readiness, Seen
from gpucloud.domain.witness import Word, word_of
from gpucloud.usecases.bootstrap import Bootstrapped
from gpucloud.usecases.prepare import Preparer
from gpucloud.usecases.world import World

_LIMIT_S = 2.0
_TRAINING = "the training, whose steps go on,"
# A step that a machine took part in may be told of so much later: rank 0 writes five times a second, its agent ten.
_TOLD_LATE = timedelta(seconds=1.5)


@dataclass(slots=True)
class _Asked:
    """A peer's knock at a silent machine; `word` is of the last one that is over."""

    peer: str = ""
    work: Future[Word] | None = None
    word: Word = Word.NOTHING
    witness: str = ""


@dataclass(slots=True)
class _Steps:
    """When the open attempt was seen at which step, at every step that was seen; the newest last."""

    attempt: int = 0
    seen: deque[tuple[datetime, int]] = field(default_factory=lambda: deque(maxlen=256))

    def made_since(self, moment: datetime) -> int:
        """Return how many steps were made after `moment`, as far as they were seen."""
        before = [step for at, step in self.seen if at <= moment]
        return self.seen[-1][1] - max(before) if before else 0


@dataclass(slots=True)
class Witnesses:
    """Hears second witnesses beside everything else; a machine that answers again needs none."""

    world: World
    preparer: Preparer
    pool: ThreadPoolExecutor
    _asked: dict[str, _Asked] = field(default_factory=dict)
    _steps: _Steps = field(default_factory=_Steps)

    def hear(self, seen: Seen) -> Seen:
        """Return what is seen with what is said of each silent machine; ask about those that are silent for long."""
        self._watch_steps(seen)
        peers = [n for n in seen.nodes if n.readiness is Readiness.READY and not n.silent_for and not is_gone(n)]
        return replace(seen, nodes=tuple(self._hear(node, peers, seen) for node in seen.nodes))

    def _hear(self, node: NodeSeen, peers: list[NodeSeen], seen: Seen) -> NodeSeen:
        if is_gone(node) or not node.silent_for:
            self._asked.pop(node.node.id, None)
            return node
        if self._trains_on(node, seen):
            return replace(node, word=Word.ALIVE, witness=_TRAINING)
        # A third of the time in which it is believed: then the answer is there when it is needed.
        if node.silent_for < self.world.rules.limits.silent / 3:
            return node
        asked = self._ask(node.node, [peer.node for peer in peers])
        return replace(node, word=asked.word, witness=asked.witness)

    def _ask(self, node: Node, peers: list[Node]) -> _Asked:
        asked = self._asked.setdefault(node.id, _Asked())
        if asked.work is not None and asked.work.done():
            asked.word, asked.witness, asked.work = asked.work.result(), asked.peer, None
        if asked.work is None and peers:
            later = [peer for peer in peers if peer.id > asked.peer]  # each in its turn
            peer = min(later or peers, key=lambda one: one.id)
            asked.peer, asked.work = peer.id, self.pool.submit(self._knock, peer, self.preparer.made_of(peer.id), node)
        return asked

    def _knock(self, peer: Node, made: Bootstrapped, node: Node) -> Word:
        command = (made.base_python, made.package_path, "knock", "--root", made.root, "--limit", f"{_LIMIT_S:g}")
        try:
            host = self.world.shell.host(peer)
            done = host.run((*command, node.private_address, str(node.port)), timeout_s=3 * _LIMIT_S)
        except NodeError:
            return Word.NOTHING
        return word_of(done.exit_code, done.stdout.decode(errors="replace"))

    def _watch_steps(self, seen: Seen) -> None:
        attempt = seen.state.attempt
        progress = progress_of(attempt, seen) if attempt is not None else None
        if attempt is None or progress is None:
            return
        if self._steps.attempt != attempt.number:
            self._steps = _Steps(attempt=attempt.number)
        if not self._steps.seen or progress.step > self._steps.seen[-1][1]:
            self._steps.seen.append((seen.now, progress.step))

    def _trains_on(self, node: NodeSeen, seen: Seen) -> bool:
        """Ranks agree at every step (gpucloud.resume), so that a step needs all; one may have been under way."""
        attempt = seen.state.attempt
        if attempt is None or node.node.id not in {member.node_id for member in attempt.members}:
            return False
        since = seen.now - node.silent_for + _TOLD_LATE
        return self._steps.attempt == attempt.number and self._steps.made_since(since) >= 2
