"""Runs on a host, sent as text: notes which job has it, and ends what a job left there.

    python3 -I -c <this text>   with an order as JSON on standard input; one line of JSON comes back

`~/.gpucloud/taken/<host name>.json` says who has which GPUs of this host until when (homes may be shared by hosts).
Only processes of the job's own root are ended: those that bear its attempts' mark, those that run its package, and
those that write its code, data and files there.
Standard library only, Python 3.10; processes are found in `/proc`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_LIMIT_S = 10.0
_MARK = b"GPUCLOUD_ATTEMPT_DIR="
WRITES_FOR = "gpucloud-writes-for"
"""The word of a command line before the root of the job for which it writes to the host."""
_RESTS = ("agent", "attempts")

Entry = dict[str, Any]


def answer(order: Entry, *, home: Path, now_s: float) -> Entry:
    """Carry the order out and return what the caller is told.

    take      {"held": who} while another has one of the devices; {"store": why} where the store's folder is "missing",
              "another", "unreadable" or "unwritable" here, with "folder", its "owner" and "login", who we are; else
              {"address": ours, as the caller reached it}; taking twice under one node id changes nothing
    keep      {} and a later `until`; {"held": who} when another has it meanwhile
    release   {"left": what could not be ended or removed}; of its root the order's `keep` stays, paths below that

    `until` is by the caller's clock, which says `now`: no two hosts' clocks need agree.
    """
    ahead_s = now_s - order["now"]
    with _locked(home) as file:
        taken = [entry for entry in _read(file) if entry["until"] > now_s]
        mine = [entry for entry in taken if _same(entry, order)]
        others = [entry for entry in taken if not _same(entry, order)]
        if order["do"] == "release":
            _write(file, others)
            return {"left": _clear(home / order["root"], order.get("keep", []))}
        for entry in others:
            if _overlap(entry["devices"], order["devices"]):
                return {"held": {**entry, "until": entry["until"] - ahead_s}}
        fault = _store_fault(Path(order["store"]), order["token"]) if order["do"] == "take" and order["store"] else ""
        if fault:
            folder = Path(order["store"]).parents[2]  # of the group's record
            return {"store": fault, "folder": str(folder), "login": _login(os.geteuid()), "owner": _owner(folder)}
        if order["do"] == "take" and [entry["node"] for entry in mine] != [order["node"]]:
            _end(home / order["root"])
            for name in _RESTS:  # code and packages may stay: they are told apart by their hashes
                shutil.rmtree(home / order["root"] / name, ignore_errors=True)
        wanted = ("token", "name", "job", "node", "owner", "until", "devices")
        _write(file, [*others, {**{key: order[key] for key in wanted}, "until": order["until"] + ahead_s}])
    reached = os.environ.get("SSH_CONNECTION", "").split()
    return {"address": reached[2] if len(reached) == 4 else None}


@contextlib.contextmanager
def _locked(home: Path) -> Iterator[Path]:
    folder = home / ".gpucloud" / "taken"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = folder / f"{os.uname().nodename}.json"
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield file


def _read(file: Path) -> list[Entry]:
    try:
        return list(json.loads(file.read_text()))
    except (OSError, ValueError):
        return []


def _write(file: Path, entries: list[Entry]) -> None:
    beside = file.with_suffix(".new")
    with beside.open("w") as new:
        json.dump(entries, new)
        new.flush()
        os.fsync(new.fileno())
    beside.replace(file)


def _same(entry: Entry, order: Entry) -> bool:
    return bool(entry["token"] == order["token"] and entry["name"] == order["name"])


def _overlap(ours: list[str], theirs: list[str]) -> bool:
    """No list means all of them."""
    return not ours or not theirs or bool(set(ours) & set(theirs))


def _store_fault(record: Path, token: str) -> str:
    """Return why a folder as store does not serve here, nothing where it does: the group's own record lies in it."""
    try:
        if token not in record.read_text():
            return "another"
    except FileNotFoundError:
        return "another" if record.parents[2].is_dir() else "missing"
    except OSError:
        return "unreadable"
    return "" if os.access(record.parent, os.W_OK | os.X_OK) else "unwritable"


def _owner(folder: Path) -> str:
    try:
        return _login(folder.stat().st_uid)
    except OSError:
        return ""


def _login(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _clear(root: Path, keep: list[str]) -> list[str]:
    left = [] if _end(root) else [f"processes {', '.join(map(str, sorted(_ours(root))))}"]
    kept = [root / name for name in keep if (root / name).is_dir()]
    _remove(root, kept)
    for folder in (root.parent, root.parent.parent):
        with contextlib.suppress(OSError):
            folder.rmdir()  # other jobs' folders keep it
    return [*left, *([str(root)] if root.exists() and not kept else [])]


def _remove(folder: Path, kept: list[Path]) -> None:
    """Remove the folder, or all of it that no kept one is, lies in, or lies above."""
    if folder in kept:
        return
    if not any(folder in path.parents for path in kept):
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.unlink()  # a file, or a link
        return
    for inner in folder.iterdir():
        _remove(inner, kept)


def _end(root: Path) -> bool:
    """SIGKILL everything of the root until nothing is left; False when something is after some seconds."""
    deadline = time.monotonic() + _LIMIT_S
    empty = 0
    while empty < 2:  # twice: a process whose parent ends while the list is read is below nobody in that list
        found = _ours(root)
        empty = 0 if found else empty + 1
        if found and time.monotonic() > deadline:
            return False
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return True


def _ours(root: Path) -> set[int]:
    parents = {int(name): _parent(name) for name in os.listdir("/proc") if name.isdigit()}
    alive = {pid: parent for pid, parent in parents.items() if parent is not None}
    found = {pid for pid in alive if _is_ours(pid, os.fsencode(root))}
    below = set(found)
    while below:
        below = {pid for pid, parent in alive.items() if parent in below} - found
        found |= below
    return found - _line_of(os.getpid(), alive)


def _line_of(pid: int, parents: dict[int, int]) -> set[int]:
    """This process and whatever started it: a shell in the job's folder may be the one that asks."""
    line = set()
    while pid in parents and pid not in line:
        line.add(pid)
        pid = parents[pid]
    return line


def _is_ours(pid: int, root: bytes) -> bool:
    with contextlib.suppress(OSError):
        if any(v.startswith(_MARK + root + b"/") for v in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
            return True
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if words[-3:-2] == [WRITES_FOR.encode()]:
            return (b"/" + root).endswith(b"/" + words[-2])  # which may be a full path
        return any(re.fullmatch(re.escape(root) + rb"/lib/gpucloud-[0-9a-f]{64}\.zip", word) for word in words)
    return False


def _parent(pid: str) -> int | None:
    """Return the parent's pid; None for a zombie, or when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command name stands in parentheses and may hold spaces: count fields from the last one.
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[1])


if __name__ == "__main__":
    sys.stdout.write(json.dumps(answer(json.load(sys.stdin), home=Path.home(), now_s=time.time())) + "\n")
