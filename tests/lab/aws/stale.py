"""Stale reads: what DescribeInstances and DescribeAutoScalingGroups would have said some seconds ago."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.lab.aws.world import World

STALE = {"DescribeInstances", "DescribeAutoScalingGroups", "DescribeAutoScalingInstances", "DescribeInstanceStatus"}
_INSTANCE = ("_state", "_reason", "state_reason")
_GROUP = ("desired_capacity", "min_size", "max_size")


_Group = tuple[tuple[Any, ...], tuple[tuple[Any, str], ...]]  # sizes, members with their states


@dataclass(slots=True)
class _View:
    at: float
    instances: dict[str, tuple[Any, ...]]
    groups: dict[str, _Group]


class History:
    """The views of the last minutes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._views: list[_View] = []

    def keep(self) -> None:
        """Remember the present if it differs from the last view."""
        view = _View(
            time.time(),
            {one.id: tuple(getattr(one, name) for name in _INSTANCE) for one in self._world.instances()},
            {group.name: _seen(group) for group in self._world.groups()},
        )
        if not self._views or (self._views[-1].instances, self._views[-1].groups) != (view.instances, view.groups):
            self._views.append(view)

    @contextlib.contextmanager
    def as_of(self, at: float) -> Iterator[None]:
        """Make the past the present for the block."""
        self.keep()
        view = next((one for one in reversed(self._views) if one.at <= at), self._views[0])
        now, there = self._views[-1], list(self._world.instances())
        hidden = _hide(there, view)
        self._set(view)
        try:
            yield
        finally:
            for reservation, members in hidden:
                reservation.instances = members
            self._set(now)

    def _first(self, name: str) -> _Group | None:
        return next((view.groups[name] for view in self._views if name in view.groups), None)

    def _set(self, view: _View) -> None:
        for instance in self._world.instances():
            if instance.id in view.instances:
                for name, value in zip(_INSTANCE, view.instances[instance.id], strict=True):
                    setattr(instance, name, value)
        for group in self._world.groups():
            known = view.groups.get(group.name) or self._first(group.name)
            if known is not None:
                sizes, members = known
                for name, value in zip(_GROUP, sizes, strict=True):
                    setattr(group, name, value)
                group.instance_states = [member for member, _state in members]
                for member, state in members:
                    member.lifecycle_state = state


def _seen(group: Any) -> _Group:
    members = tuple((member, member.lifecycle_state) for member in group.instance_states)
    return tuple(getattr(group, name, 0) for name in _GROUP), members


def _hide(there: list[Any], view: _View) -> list[tuple[Any, list[Any]]]:
    """Take the instances that the view did not know out of their reservations."""
    hidden = []
    reservations = {
        id(reservation): reservation
        for instance in there
        for reservation in instance.ec2_backend.reservations.values()
    }  # fmt: skip
    for reservation in reservations.values():
        hidden.append((reservation, reservation.instances))
        reservation.instances = [one for one in reservation.instances if one.id in view.instances]
    return hidden
