"""Stale reads: what DescribeInstances and DescribeAutoScalingGroups would have said some seconds ago."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.lab.aws.world import World

STALE = {
    "DescribeAutoScalingGroups",
    "DescribeAutoScalingInstances",
    "DescribeInstanceStatus",
    "DescribeInstances",
    "DescribeScheduledActions",
}
_INSTANCE = ("_state", "_reason", "state_reason")
_GROUP = ("desired_capacity", "min_size", "max_size")


_Group = tuple[tuple[Any, ...], tuple[tuple[Any, str], ...]]  # sizes, members with their states


@dataclass(slots=True)
class _View:
    at: float
    instances: dict[str, tuple[Any, ...]]
    groups: dict[str, _Group]
    schedules: tuple[tuple[Any, dict[Any, Any]], ...]  # a region's scheduled actions, each as it was


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
            tuple((backend, _copied(backend.scheduled_actions)) for backend in self._world.scaling()),
        )
        if not self._views or _compared(self._views[-1]) != _compared(view):
            self._views.append(view)

    @contextlib.contextmanager
    def as_of(self, at: float) -> Iterator[None]:
        """Make the past the present for the block."""
        self.keep()
        view = next((one for one in reversed(self._views) if one.at <= at), self._views[0])
        now, there = self._views[-1], list(self._world.instances())
        hidden = _hide(there, view)
        schedules = [(backend, backend.scheduled_actions) for backend in self._world.scaling()]
        told = {id(backend): actions for backend, actions in view.schedules}
        for backend, _actions in schedules:
            backend.scheduled_actions = told.get(id(backend), {})
        self._set(view)
        try:
            yield
        finally:
            for backend, actions in schedules:
                backend.scheduled_actions = actions
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


def _copied(actions: dict[Any, Any]) -> dict[Any, Any]:
    return {key: copy.copy(action) for key, action in actions.items()}


def _compared(view: _View) -> tuple[Any, ...]:
    actions = [(key, vars(one)) for _backend, found in view.schedules for key, one in found.items()]
    return view.instances, view.groups, actions


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
