"""One group being watched: asked at most once an interval, with what was learned between the listings."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from gpucloud.adapters.aws.nodes.listing import Listing, ended_by_a_user, read, with_activities
from gpucloud.adapters.aws.nodes.place import Place
from gpucloud.adapters.aws.nodes.recollection import Recollection
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.errors import ProvisionError, StoreError
from gpucloud.domain.node.node import GroupView, Node, NodeState

# A view that cannot be renewed now is believed for so long.
_BELIEVED = timedelta(seconds=60)
_KEY_EVERY = timedelta(seconds=1)

Listed = tuple[Listing, GroupView]
"""What AWS lists of a group, raw and in our words."""


@dataclass
class Watch:
    """Knows one group. Whoever calls it holds `lock`."""

    aws: Aws
    place: Place
    memory: Recollection
    threads: Executor
    host_key: Callable[[str, str, str], str | None]
    now: Callable[[], datetime]
    interval: timedelta
    lock: threading.RLock = field(default_factory=threading.RLock)
    _view: GroupView | None = None
    _listing: Listing | None = None
    _asked_at: datetime | None = None
    _read_at: datetime | None = None
    _keys_asked: dict[str, datetime] = field(default_factory=dict)

    def view(self) -> GroupView:
        """Return the group as last listed, at most `interval` ago. While AWS cannot be asked, as of up to 60 s ago."""
        now = self.now()
        if self._view is not None and self._asked_at is not None and now - self._asked_at < self.interval:
            return self._view
        try:
            return self.renewed()[1]
        except ProvisionError as error:
            if self._listing is None or self._is_too_old(now) or not error.may_pass:
                raise
            self._asked_at = now
            self._view = self.memory.view(self._listing, now)
            return self._view

    def renewed(self) -> Listed:
        """Ask AWS now and return what it lists; `exists=False` when there is no group."""
        asked_at = self.now()
        listing = read(self.aws, self.place, self.threads)
        if self._needs_activities(listing):
            listing = with_activities(listing, self.aws, self.place)
        view = self.memory.view(listing, self.now())
        self._view = replace(view, nodes=self._with_keys(view))
        self._listing, self._asked_at, self._read_at = listing, asked_at, asked_at
        return listing, self._view

    def relieve(self, node_id: str, listing: Listing) -> GroupView:
        """Remember that another machine comes in its place, and return what was listed in that light."""
        self.memory.relieve(node_id)
        return self.memory.view(listing, self.now())

    def changed(self) -> None:
        """Something was done to the group: the next view asks AWS."""
        self._asked_at = None

    def _is_too_old(self, now: datetime) -> bool:
        return self._read_at is None or now - self._read_at > _BELIEVED

    def _needs_activities(self, listing: Listing) -> bool:
        """Only the group's own story says why it is below its level, or that a shut-off has fired."""
        if listing.group is None:
            return False
        below = len(listing.counted) < listing.desired
        ended = any(ended_by_a_user(i) and not self.memory.is_known_ended(i["InstanceId"]) for i in listing.instances)
        return below or (ended and listing.schedule.at is None and self.memory.shut_off is None)

    def _with_keys(self, view: GroupView) -> tuple[Node, ...]:
        without = [n.id for n in view.nodes if n.state is NodeState.RUNNING and n.host_key is None]
        for _ in self.threads.map(self._ask_key, [node_id for node_id in without if self._may_ask(node_id)]):
            pass  # raises what a thread raised
        return tuple(replace(node, host_key=self.memory.host_keys.get(node.id)) for node in view.nodes)

    def _may_ask(self, node_id: str) -> bool:
        now = self.now()
        last = self._keys_asked.get(node_id)
        if last is not None and now - last < _KEY_EVERY:
            return False
        self._keys_asked[node_id] = now
        return True

    def _ask_key(self, node_id: str) -> None:
        """A key that cannot be had now is asked for again: whoever connects waits for it, with a limit of his own."""
        try:
            key = self.host_key(self.place.region, self.place.cluster, node_id)
        except (ProvisionError, StoreError):
            return
        if key is not None:
            self.memory.host_keys[node_id] = key
