"""Linux namespaces and mounts, by the C library: Python has them from 3.12 on only. Every call raises OSError."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

# linux/sched.h
MOUNTS, HOST_NAME, USER, PIDS, NETWORK = 0x00020000, 0x04000000, 0x10000000, 0x20000000, 0x40000000

_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 0x40000  # sys/mount.h: MS_…
_NO_SUID, _NO_DEVICES = 0x2, 0x4
_PARENT_DEATH_SIGNAL = 1  # prctl(2)


def unshare(kinds: int) -> None:
    """Leave these namespaces for new ones; of PIDS: the children to come do."""
    _check(_library().unshare(kinds), "unshare")


def enter(namespace: int, kind: int) -> None:
    """Enter the namespace that the descriptor names."""
    _check(_library().setns(namespace, kind), "setns")


def unshare_user(*, as_id: int, group_id: int) -> None:
    """Enter a new user namespace as these ids, which stand for those that the process has now; it may do all there."""
    uid, gid = os.geteuid(), os.getegid()
    unshare(USER)
    own = Path("/proc/self")
    (own / "setgroups").write_text("deny")
    (own / "uid_map").write_text(f"{as_id} {uid} 1")
    (own / "gid_map").write_text(f"{group_id} {gid} 1")


def keep_mounts_private() -> None:
    """Let no mount made here be seen outside, nor the other way round."""
    _mount(None, "/", None, _RECURSIVE | _PRIVATE)


def mount_proc() -> None:
    """Have `/proc` show this PID namespace."""
    _mount("proc", "/proc", "proc", 0)


def mount_over(source: Path, target: Path) -> None:
    """Have the file `source` seen at `target` too."""
    _mount(str(source), str(target), None, _BIND)


def mount_small_disk(target: Path, mib: int) -> None:
    """Put an empty disk of that size at `target`; it is full when it is full."""
    _mount("tmpfs", str(target), "tmpfs", _NO_SUID | _NO_DEVICES, f"size={mib}m,mode=0700")


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies."""
    _check(_library().prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0), "prctl")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    words = (os.fsencode(word) if word is not None else None for word in (source, target, kind))
    options = os.fsencode(data) if data is not None else None
    _check(_library().mount(*words, ctypes.c_ulong(flags), options), f"mount {target}")


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
