"""Asking hosts, several at once: to be taken, to be kept, to be cleared."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from gpucloud.adapters.hosts import onhost
from gpucloud.domain.errors import GpucloudError, NodeError, RemoteCommandFailed
from gpucloud.domain.node.node import Node
from gpucloud.ports import Completed, Shell

AT_ONCE = 8
_LIMIT_S = 30.0
_LATEST_S = 16725225600.0  # the end of the calendar, year 2500
_RUN = 'exec "${GPUCLOUD_PYTHON:-python3}" -I -c "$1"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What one host is told; see `onhost.answer`."""

    node: Node
    order: dict[str, Any]


class Asking:
    """Speaks to hosts over connections of its own, which end with each call."""

    def __init__(self, shell: Callable[[], Shell]) -> None:
        self._shell = shell

    def ask(self, orders: Sequence[Order]) -> tuple[dict[str, Any] | GpucloudError, ...]:
        """Return each host's answer, or why it gave none, in the order of the orders."""
        if not orders:
            return ()
        shell = self._shell()
        try:
            with ThreadPoolExecutor(max_workers=min(AT_ONCE, len(orders)), thread_name_prefix="hosts") as pool:
                return tuple(pool.map(lambda order: _answer(shell, order), orders))
        finally:
            shell.close()


def _answer(shell: Shell, order: Order) -> dict[str, Any] | GpucloudError:
    try:
        return _asked(shell, order)
    except GpucloudError as error:
        return error


def _asked(shell: Shell, order: Order) -> dict[str, Any]:
    stdin = json.dumps(order.order).encode()
    host = shell.host(order.node)
    done = host.run(("sh", "-c", _RUN, "sh", inspect.getsource(onhost)), stdin=stdin, timeout_s=_LIMIT_S)
    host.close()
    if done.exit_code != 0:
        raise _failed(order.node, done)
    lines = done.stdout.splitlines()
    try:
        return _usable(json.loads(lines[-1]))  # a login banner may come first
    except (LookupError, ValueError, TypeError, RecursionError) as error:
        raise NodeError(f"{order.node.id}: an answer that is none: {done.stdout[-200:]!r}") from error


def _usable(answer: Any) -> dict[str, Any]:
    """Return an answer of which every word can be used: others of the login may write there too.

    Raises ValueError, TypeError, LookupError.
    """
    found = dict(answer)
    if not found.keys() & {"address", "held", "store", "left"}:
        raise ValueError("nothing that a host answers")
    if (holder := found.get("held")) is not None:
        _require_words(holder["job"], holder["owner"], *holder["devices"])
        if not 0 <= holder["until"] < _LATEST_S:
            raise ValueError("a time that cannot be")
    _require_words(found.get("address") or "", *(found.get("left") or ()))
    return found


def _require_words(*found: object) -> None:
    if not all(isinstance(word, str) for word in found):
        raise TypeError("a word that is none")


def _failed(node: Node, done: Completed) -> RemoteCommandFailed:
    """Say what the host answered, and how to see which of the two that it must have it lacks."""
    said = (done.stderr.strip() or done.stdout.strip()).decode(errors="replace").splitlines()[-1:]
    return RemoteCommandFailed(
        f"{node.id}: exit code {done.exit_code}{f': {said[0]}' if said else ''}",
        hint=f"`ssh {node.user}@{node.address} \"exec /bin/sh -c 'python3 -V'\"` must say 3.10 or newer: if its login"
        " shell does not start that, chsh -s /bin/sh",
    )
