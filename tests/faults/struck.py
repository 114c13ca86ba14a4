"""`python -m tests.faults.struck …` is `gpucloud …`, which strikes itself at a call that it makes to the outside.

GPUCLOUD_TEST_STRIKE: JSON with `folder`, `cloud` and `group`; with `call`, `nth`, `after`, `signal`, `twice` for a
strike. Files in the folder: `calls`, a line for each call that may change something; `looks`, a line for each look at
the cloud's records, empty where all is well; `struck`, once the strike is due.
"""

from __future__ import annotations

import functools
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gpucloud.__main__ import main
from gpucloud.adapters.home import Home
from gpucloud.adapters.local.group import LocalNodeGroup
from gpucloud.adapters.local.provision import EmbeddedProvisioner
from gpucloud.adapters.local.records import Folder
from gpucloud.adapters.ssh.shell import SshHost, SshShell
from gpucloud.store.directory import DirectoryStore
from gpucloud.system.retries import SystemClock
from tests.faults.strikes import describe

_OUTSIDE: dict[str, tuple[type, tuple[str, ...]]] = {
    "home": (Home, ("remember",)),
    "store": (DirectoryStore, ("get", "put", "list", "delete")),
    "provisioner": (EmbeddedProvisioner, ("ensure", "destroy")),
    "group": (LocalNodeGroup, ("describe", "arm", "resize", "relieve", "terminate", "purge", "interrupt")),
    "shell": (SshShell, ("host",)),
    "host": (SshHost, ("run", "sync")),
    "clock": (SystemClock, ("sleep",)),
}
_OWN = re.compile(r"(?<= )[0-9a-f]{4,}$|i-[0-9a-f]+|[0-9a-f]{16,}|/0\d+\b|\d{6,}")


def breach(cloud: Path, group: str) -> str | None:
    """Return how there are machines, or machines asked for, with no shut-off ahead, by the cloud's own records.

    Machines are read first: what is armed before they start is armed when it is read after them.
    """
    folder = Folder(cloud)
    alive = sum(node.alive for node in folder.nodes(group))
    record = folder.group(group)
    if record is None or not (alive or record.size):
        return None
    if record.armed_until is not None and record.armed_until > datetime.now(timezone.utc):
        return None
    return f"{alive} machines, {record.size} asked for, {record.armed_until}"


class _Striker:
    """Counts calls by kind, whatever thread makes them."""

    def __init__(self, told: dict[str, Any]) -> None:
        self._told = told
        self._folder = Path(told["folder"])
        self._cloud = Path(told["cloud"])
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._again = False

    def around(self, call: str, do: Callable[[], Any]) -> Any:
        kind = _OWN.sub("*", call)
        with self._lock:
            self._counts[kind] += 1
            due = (self._told.get("call"), self._told.get("nth")) == (kind, self._counts[kind])
            if not kind.startswith("!"):
                self._write("calls", kind)
        self._look(f"before {kind}")
        if self._again or (due and not self._told["after"]):
            self._hit()
        result = do()
        self._look(f"after {kind}")
        if due and self._told["after"]:
            self._hit()
        return result

    def _look(self, when: str) -> None:
        found = breach(self._cloud, self._told["group"])
        with self._lock:
            self._write("looks", f"{when}: {found}" if found else "")

    def _hit(self) -> None:
        (self._folder / "struck").touch()
        self._again = bool(self._told["twice"]) and not self._again
        os.kill(os.getpid(), self._told["signal"])

    def _write(self, name: str, text: str) -> None:
        with (self._folder / name).open("a", encoding="utf-8") as file:
            file.write(text + "\n")


def _wrap(striker: _Striker, kind: str, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: object, *arguments: Any, **named: Any) -> Any:
        return striker.around(describe(kind, name, arguments), lambda: method(self, *arguments, **named))

    return call


def _put_in() -> None:
    striker = _Striker(json.loads(os.environ["GPUCLOUD_TEST_STRIKE"]))
    for kind, (owner, names) in _OUTSIDE.items():
        for name in names:
            setattr(owner, name, _wrap(striker, kind, name, getattr(owner, name)))


if __name__ == "__main__":
    _put_in()
    main()
