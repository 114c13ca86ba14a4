"""`python -m tests.faults.struck …` is `gpucloud …`, which strikes itself at a call that it makes to the outside.

GPUCLOUD_TEST_STRIKE: JSON with `call`, `nth`, `after`, `signal`, `twice`. GPUCLOUD_TEST_CALLS: a file that gets a line
for each call that may change something.
"""

from __future__ import annotations

import functools
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpucloud.__main__ import main
from gpucloud.adapters.clock import SystemClock
from gpucloud.adapters.home import Home
from gpucloud.adapters.local.group import LocalNodeGroup
from gpucloud.adapters.local.provision import EmbeddedProvisioner
from gpucloud.adapters.ssh.shell import SshHost, SshShell
from gpucloud.store.directory import DirectoryStore
from tests.faults.strikes import describe

_OUTSIDE: dict[str, tuple[type, tuple[str, ...]]] = {
    "home": (Home, ("remember",)),
    "store": (DirectoryStore, ("get", "put", "list", "delete")),
    "provisioner": (EmbeddedProvisioner, ("ensure", "destroy")),
    "group": (LocalNodeGroup, ("describe", "arm", "resize", "detach", "terminate", "purge", "interrupt")),
    "shell": (SshShell, ("host",)),
    "host": (SshHost, ("run", "sync")),
    "clock": (SystemClock, ("sleep",)),
}
_OWN = re.compile(r"i-[0-9a-f]+|[0-9a-f]{16,}|/0\d+\b|\d{6,}")


class _Striker:
    """Counts calls by kind, whatever thread makes them."""

    def __init__(self) -> None:
        self._strike = json.loads(os.environ.get("GPUCLOUD_TEST_STRIKE", "null"))
        self._list = os.environ.get("GPUCLOUD_TEST_CALLS")
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._again = False

    def around(self, call: str, do: Callable[[], Any]) -> Any:
        kind = _OWN.sub("*", call)
        with self._lock:
            self._counts[kind] += 1
            due = self._strike and (self._strike["call"], self._strike["nth"]) == (kind, self._counts[kind])
        if self._list and not kind.startswith("!"):
            with Path(self._list).open("a", encoding="utf-8") as file:
                file.write(kind + "\n")
        if self._again or (due and not self._strike["after"]):
            self._hit()
        result = do()
        if due and self._strike["after"]:
            self._hit()
        return result

    def _hit(self) -> None:
        self._again = bool(self._strike["twice"]) and not self._again
        os.kill(os.getpid(), self._strike["signal"])


def _wrap(striker: _Striker, kind: str, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: object, *arguments: Any, **named: Any) -> Any:
        return striker.around(describe(kind, name, arguments), lambda: method(self, *arguments, **named))

    return call


def _put_in() -> None:
    striker = _Striker()
    for kind, (owner, names) in _OUTSIDE.items():
        for name in names:
            setattr(owner, name, _wrap(striker, kind, name, getattr(owner, name)))


if __name__ == "__main__":
    _put_in()
    main()
