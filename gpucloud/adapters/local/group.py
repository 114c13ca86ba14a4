"""Node groups of the embedded cloud: every call changes a record and sees to it that the daemon lives."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path

from gpucloud.adapters.local.records import Folder, GroupRecord, NodeRecord, noticed
from gpucloud.domain.errors import FleetElsewhere, ProvisionError
from gpucloud.domain.node.node import NO_GROUP, EndCause, Fault, Fleet, GroupView, Refusal, fleet_of
from gpucloud.domain.offer import Pool
from gpucloud.domain.variables import GPUCLOUD_NODE
from gpucloud.system import processes
from gpucloud.system.processes import import_path, try_lock

_PURGE_S = 30.0
_POLL_S = 0.01


class LocalNodeGroup:
    """Implements `NodeGroup` over the folder `root`, and what only an emulated cloud can do, such as `freeze`.

    What is given is kept in the folder, and what is left out stays as it is there: `clock_factor`, how much faster than
    EC2's 120 s a node is interrupted; `server`, the command of the nodes' SSH server; `daemon`, the command that keeps
    the folder, in place of ours. `fleet` tells whose groups they are: one that is named after another is refused.
    """

    def __init__(
        self,
        root: Path,
        *,
        fleet: Callable[[], Fleet] | None = None,
        clock_factor: float | None = None,
        server: tuple[str, ...] | None = None,
        daemon: tuple[str, ...] | None = None,
    ) -> None:
        self._folder = Folder(root)
        self._fleet = fleet
        if clock_factor is not None or server is not None or daemon is not None:
            self._folder.create()
            with self._folder.locked():
                old = self._folder.settings()
                new = replace(
                    old,
                    clock_factor=clock_factor or old.clock_factor,
                    server=server or old.server,
                    daemon=daemon or old.daemon,
                )
                if new != old:
                    self._folder.save_settings(new)

    @property
    def notice_seconds(self) -> float:
        """Seconds between a notice and the node's end (a notice names whole seconds: up to one more)."""
        return self._folder.settings().notice_s

    def describe(self, group: str) -> GroupView:
        """Return the group as its records say; repairs it when the daemon has died."""
        record, nodes = self._read(group)
        if _needs_daemon(record, nodes) and kick(self._folder):
            record, nodes = self._read(group)
        listed = tuple(node.listed() for node in nodes)
        if record is None:
            return replace(NO_GROUP, nodes=listed)
        refusals = _refusals(record)
        return GroupView(exists=True, size=record.size, armed_until=record.armed_until, nodes=listed, refusals=refusals)

    def arm(self, group: str, until: datetime) -> None:
        """Set the shut-off; a time that has passed counts as this moment."""
        with self._changing(group) as record:
            self._folder.save_group(replace(record, armed_until=max(until, _now())))

    def resize(
        self,
        group: str,
        size: int,
        pool: Pool,
        *,
        cap_usd_per_hour: Decimal | None = None,  # noqa: ARG002  nothing here costs more
    ) -> None:
        """Set the level; ProvisionError when it is above 0 and no shut-off lies ahead."""
        with self._changing(group) as record:
            if size > 0 and (record.armed_until is None or record.armed_until <= _now()):
                raise ProvisionError(
                    f"{group}: no node starts without a shut-off time ahead (it is {record.armed_until})",
                    hint="arm the group first",
                )
            if size > 0:  # before it is written: whoever dies in between leaves no level that nothing keeps
                begin(self._folder)
            self._folder.save_group(replace(record, size=size, pool=pool))

    def relieve(
        self,
        group: str,
        node_id: str,
        *,
        cap_usd_per_hour: Decimal | None = None,  # noqa: ARG002  nothing here costs more
    ) -> None:
        """Count the node no more: the level starts another one now."""
        self._change(group, node_id, lambda node: replace(node, relieved=True))

    def terminate(self, group: str, node_id: str, *, bad: bool = False) -> None:  # noqa: ARG002  nodes are made anew
        """End the node by choice."""
        self._change(group, node_id, _ended_by_choice)

    def purge(self, group: str, *, keep: tuple[tuple[str, str], ...] = ()) -> None:  # noqa: ARG002  no disk stays
        """Set the level to 0, end every node, and return when no process of them is left; no group is no error."""
        away = fleet_elsewhere(group, self._fleet)
        if (away is not None and not away.is_here) or self._read(group)[0] is None:
            return  # from here, nothing is there to end
        group = in_folder(group)
        with self._changing(group) as record:
            self._folder.save_group(replace(record, size=0))
            ending = [node for node in self._folder.nodes(group) if node.alive]
            for node in ending:
                self._folder.save_node(group, replace(node, ending=node.ending or EndCause.CHOICE))
        deadline = time.monotonic() + _PURGE_S
        while alive := self.describe(group).alive:
            if time.monotonic() > deadline:
                raise _still_alive(group, [node.id for node in alive])
            time.sleep(_POLL_S)
        left = [node.id for node in ending if processes.marked(GPUCLOUD_NODE, node.id)]
        if left:
            raise _still_alive(group, left)

    def interrupt(self, group: str, node_id: str, *, notice: bool) -> None:
        """Take the node after `notice_seconds` with a notice, or at once without one."""
        if notice:
            self._change(group, node_id, lambda node: noticed(node, _now(), self.notice_seconds))
        else:
            self._change(group, node_id, lambda node: replace(node, ending=node.ending or EndCause.INTERRUPTED))

    def recommend_rebalance(self, group: str, node_id: str) -> None:
        """Tell the node that its risk has risen; it may never be interrupted."""
        self._change(group, node_id, lambda node: replace(node, rebalance_at=node.rebalance_at or _now()))

    def freeze(self, group: str, node_id: str) -> None:
        """Stop every process of the node (SIGSTOP): it stays listed as running and answers nothing."""
        self._change(group, node_id, lambda node: replace(node, frozen=True))

    def owner_of(self, node_id: str) -> tuple[str, str] | None:
        """Return the group that has the node, and the job that it is tagged with; None when no group has it."""
        with contextlib.suppress(FileNotFoundError), self._locked():
            for group in filter(None, map(self._folder.group, self._folder.groups())):
                if self._folder.node(group.name, node_id) is not None:
                    return group.name, dict(group.tags).get("gpucloud:job", group.name)
        return None

    def run_short(self, until: datetime) -> None:
        """Have no spot machines to start until then; those that run stay."""
        self._folder.create()
        with self._folder.locked():
            self._folder.save_settings(replace(self._folder.settings(), no_spot_until=until))

    def _here(self, group: str) -> str:
        """Return the group's name in the folder. FleetElsewhere for one that is of another home's."""
        if (away := fleet_elsewhere(group, self._fleet)) is not None:
            raise away
        return in_folder(group)

    def _read(self, group: str) -> tuple[GroupRecord | None, tuple[NodeRecord, ...]]:
        """Of another home's group whose nodes have all ended, these are told: there is nothing to change any more."""
        if (away := fleet_elsewhere(group, self._fleet)) is not None:
            fleet = fleet_of(group)
            there = None if away.is_here or fleet is None else _read_there(fleet, in_folder(group))
            if there is None:
                raise away
            return None, there[1]
        group = in_folder(group)
        with contextlib.suppress(FileNotFoundError), self._locked():
            return self._folder.group(group), self._folder.nodes(group)
        return None, ()

    @contextlib.contextmanager
    def _changing(self, group: str) -> Iterator[GroupRecord]:
        group = self._here(group)
        try:
            with self._locked():
                record = self._folder.group(group)
                if record is None:
                    raise _no_group(group)
                yield record
        except FileNotFoundError as error:
            raise _no_group(group) from error
        if _needs_daemon(*self._read(group)):
            kick(self._folder)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the folder's lock; FileNotFoundError when there is no folder, ProvisionError when it is not ours."""
        try:
            with self._folder.locked():
                yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ProvisionError(
                f"the embedded cloud's folder {self._folder.root} cannot be used: {error}",
                hint="set GPUCLOUD_HOME to a folder that you may write to",
            ) from error

    def _change(self, group: str, node_id: str, change: Callable[[NodeRecord], NodeRecord]) -> None:
        """Change a node that is alive; one that has ended stays as it is."""
        with self._changing(group) as record:
            node = self._folder.node(record.name, node_id)
            if node is None:
                raise ProvisionError(f"{record.name} has no node {node_id}", hint="take an id from the group's list")
            if node.alive:
                self._folder.save_node(record.name, change(node))


def fleet_elsewhere(group: str | None, own: Callable[[], Fleet] | None) -> FleetElsewhere | None:
    """Return the error for a group on the embedded fleet of another home than `own`, None for others.

    That home is here where its folder tells of machines that are alive, or are to be: they can be ended there. One that
    may not be read, as another user's, is as one of another host: nobody here can end its machines.
    """
    fleet = fleet_of(group)
    if group is None or fleet is None or (own is not None and own().identity == fleet.identity):
        return None
    name = in_folder(group)
    try:
        there = _read_there(fleet, name)
        is_here = there is not None and _needs_daemon(*there)
    except ProvisionError:  # damaged: what lives there cannot be told
        is_here = True
    return fleet.elsewhere(name.removeprefix("gpucloud-"), is_here=is_here)


def in_folder(group: str) -> str:
    """Return what a group is called in its home's folder: its name there is the last part of the whole one."""
    return group.rpartition("/")[2]


def _read_there(fleet: Fleet, name: str) -> tuple[GroupRecord | None, tuple[NodeRecord, ...]] | None:
    """Return the group as the folder of a home on this machine has it; None where that home is not here.

    It is only read: its name may have been written by anybody. In a container, a folder of that name is another's.
    """
    home = Path(fleet.home)
    try:
        if fleet.host == socket.gethostname() and (home / "identity").read_text().strip() == fleet.identity:
            folder = Folder(home / "cloud")
            return folder.group(name), folder.nodes(name)
    except (OSError, ValueError):  # absent, another user's, no folder, no name of one, or on a disk that went away
        return None
    return None


def _needs_daemon(record: GroupRecord | None, nodes: tuple[NodeRecord, ...]) -> bool:
    return record is not None and (record.size > 0 or any(node.alive for node in nodes))


def _refusals(record: GroupRecord) -> tuple[Refusal, ...]:
    short = record.short_of
    pool = short.pool or record.pool if short is not None else None
    if short is None or pool is None:
        return ()
    return (
        Refusal(
            pool=pool,
            fault=Fault.CAPACITY,
            code=short.code,
            message=short.message,
            at=short.at,
            hint="gpucloud status of the other jobs on this machine",
        ),
    )


def _no_group(group: str) -> ProvisionError:
    return ProvisionError(f"there is no node group {group}", hint="make the cluster first")


def _still_alive(group: str, ids: list[str]) -> ProvisionError:
    return ProvisionError(f"{group}: {', '.join(ids)} still alive after {_PURGE_S:.0f} s", hint="repeat the command")


def _now() -> datetime:
    return datetime.now(timezone.utc)


def _ended_by_choice(node: NodeRecord) -> NodeRecord:
    return replace(node, relieved=True, ending=node.ending or EndCause.CHOICE)


# Starts the embedded cloud's daemon unless it lives.


# An interpreter without site-packages (10 ms) forks once more and ends, so that the daemon is nobody's child:
# nobody has to wait for it, and it outlives whoever asked for it.
_ORPHAN = "import os, sys\nif os.fork() == 0:\n    os.execv(sys.argv[1], sys.argv[1:])"
_LIMIT_S = 20.0
_STARTS = 2
_START_POLL_S = 0.005


def kick(folder: Folder) -> bool:
    """Return when the daemon lives: whether that took a start. ProvisionError when it does not start.

    A daemon that has started has dealt with what an earlier one left: records read after that are true.

    The daemon lives as long as it holds its lock, and is born with it: whoever gets the lock starts the daemon and
    hands the lock over as an open file, so that there is no moment at which a second one could start.
    """
    deadline = time.monotonic() + _LIMIT_S
    starts, waited = int(begin(folder)), False
    while not folder.daemon_pid.exists():
        if starts > _STARTS or time.monotonic() > deadline:
            raise ProvisionError("the embedded cloud does not start", hint=f"look into {folder.log}")
        time.sleep(_START_POLL_S)
        waited = True
        # A daemon with little to do may have come and gone meanwhile: then its file is there, and its lock is free.
        if not folder.daemon_pid.exists():
            starts += begin(folder)
    return waited


def begin(folder: Folder) -> bool:
    """Start the daemon unless it lives, and do not wait for it: whether it was started. ProvisionError as for `kick`.

    Called with the folder's lock held, it has the daemon wait for that lock: what is written meanwhile will be kept,
    though its author die at once; when nothing was written, the daemon ends.
    """
    lock = os.open(folder.daemon_lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not try_lock(lock):
            return False
        folder.daemon_pid.unlink(missing_ok=True)
        _start(folder, lock)
        return True
    finally:
        os.close(lock)


def _start(folder: Folder, lock: int) -> None:
    daemon = folder.settings().daemon or (sys.executable, "-m", "gpucloud.adapters.local.daemon")
    options = ("--root", str(folder.root), "--lock", str(lock))
    try:
        with folder.log.open("ab") as log:
            subprocess.run(
                (sys.executable, "-I", "-S", "-c", _ORPHAN, *daemon, *options),
                env=_environment(),
                cwd=folder.root,  # `-m` searches there first: it must not be a folder with a `random.py` of the user's
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(lock,),
                start_new_session=True,
                check=True,
            )
    except (OSError, subprocess.CalledProcessError) as error:
        raise ProvisionError(f"cannot start the embedded cloud: {error}", hint=f"look into {folder.log}") from error


def _environment() -> dict[str, str]:
    """Return the daemon's environment: no secret of the caller's, and no mark of a node that the caller may be on."""
    kept = {
        name: os.environ[name]
        for name in ("PATH", "HOME", "TMPDIR", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
        if name in os.environ
    }
    return {**kept, "LANG": "C.UTF-8", **import_path()}
