"""What is brought home when an attempt is over: the rest of its output, the cause of a failure, results, profiles."""

from __future__ import annotations

from dataclasses import dataclass

from gpucloud.domain.errors import NodeError, StoreError
from gpucloud.domain.launch import workers_per_node
from gpucloud.domain.state import ExitReason
from gpucloud.domain.supervision.action import CloseAttempt
from gpucloud.domain.supervision.seen import Seen
from gpucloud.usecases.failure import last_words
from gpucloud.usecases.history import HistoryKeeper
from gpucloud.usecases.lookout import LogReader, read_node
from gpucloud.usecases.prepare import Preparer
from gpucloud.usecases.profiles import bring_profiles
from gpucloud.usecases.sundries import SundryBook
from gpucloud.usecases.world import Watcher, World


@dataclass(slots=True)
class Closing:
    """Brings home what an attempt leaves on its nodes; of a node that is gone, what had been read of it is kept."""

    world: World
    preparer: Preparer
    logs: LogReader
    history: HistoryKeeper
    watcher: Watcher

    def bring(self, action: CloseAttempt, seen: Seen) -> None:
        """Bring all there is, and tell what became of it. Raises StoreError when the output cannot be kept."""
        self._read_to_the_end(seen)
        self._explain(action, seen)
        brought = self._bring_home(action, seen)
        self._bring_profiles(seen)
        if seen.state.attempt is not None:
            SundryBook(world=self.world).bill(seen.state, seen.state.attempt, brought)

    def _read_to_the_end(self, seen: Seen) -> None:
        attempt = seen.state.attempt
        alive = {node.id: node for node in seen.group.alive}
        for member in attempt.members if attempt else ():
            if member.node_id not in alive:
                continue
            try:
                host = self.world.shell.host(alive[member.node_id])
                while read_node(host, member.node_id, attempt, workers_per_node(self.world.job), self.logs)[1]:
                    pass  # a long output comes in pieces
                if attempt is not None:
                    self.history.look(host, attempt.number, last=True)
            except NodeError:
                continue  # gone meanwhile: what had been read of it is kept
        self.logs.flush()

    def _explain(self, action: CloseAttempt, seen: Seen) -> None:
        attempt = seen.state.attempt
        if attempt is None or action.reason is not ExitReason.USER_ERROR:
            return
        try:
            words = last_words(attempt, seen, self.world.jobs, self.world.shell)
        except NodeError:
            return
        if words:
            self.watcher.story(words)

    def _bring_home(self, action: CloseAttempt, seen: Seen) -> tuple[str, ...]:
        """The outputs lie on the node of rank 0; without it, there are none to bring."""
        attempt = seen.state.attempt
        first = attempt.members[0].node_id if attempt is not None else ""
        node = next((node for node in seen.group.alive if node.id == first), None)
        code = self.preparer.code_on(first)
        if action.reason.retried or node is None or code is None:
            return ()
        try:
            brought = self.world.outputs.bring_home(self.world.shell.host(node), code)
        except (NodeError, StoreError) as error:
            self.watcher.story(f"the outputs could not be brought home: {error}")
            return ()
        for path in brought:
            self.watcher.story(f"brought home: {path}")
        return brought

    def _bring_profiles(self, seen: Seen) -> None:
        attempt = seen.state.attempt
        if self.world.job.profile_steps and attempt is not None:
            members = {member.node_id for member in attempt.members}
            nodes = tuple(node for node in seen.group.alive if node.id in members)
            for line in bring_profiles(self.world.outputs, self.world.shell, nodes, attempt.number):
                self.watcher.story(line)
