"""The embedded cloud's one background process: makes the world equal to the records, again and again.

It is level-triggered and crash-only. What shall be is in the records (`folder`), what comes next is decided by `level`,
and this process does it. Nodes hold a pipe that it alone can write to: when it dies, however it dies, they end.
"""

from __future__ import annotations

import argparse
import logging
import os
import selectors
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from gpucloud.adapters.local import node
from gpucloud.adapters.local.ground import Grounds, Loopback
from gpucloud.adapters.local.market import devices_here, gpus_of
from gpucloud.adapters.local.node import Machine, settle
from gpucloud.adapters.local.records import NO_GPUS, Folder, GroupRecord, NodeRecord, Settings, ShortOf, ended
from gpucloud.domain.errors import ProvisionError
from gpucloud.domain.job.spec import Market
from gpucloud.domain.node.node import EndCause, NodeState
from gpucloud.system import processes

_TICK_S = 0.03
_BOOTING_TICK_S = 0.005
_HEARTBEAT_S = 1.0
_PAUSE_S = 2.0
"""How long a group starts nothing after one of its nodes died while it booted."""

_log = logging.getLogger("gpucloud.cloud")


class Daemon:
    """Keeps every group of one folder; `lock` is the daemon's lock, held and handed over by whoever started it.

    Nodes stand on what `grounds` makes.
    """

    def __init__(self, folder: Folder, lock: int, grounds: Grounds) -> None:
        self._folder = folder
        self._lock = lock
        self._grounds = grounds
        self._pipe, self._held_end = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._settings = Settings()
        self._devices = devices_here()
        self._groups: dict[str, GroupRecord] = {}
        self._machines: dict[str, Machine] = {}
        self._paused: dict[str, float] = {}
        self._seen: int | None = None
        self._heartbeat_at = float("-inf")

    def run(self) -> None:
        """Work until every group has size 0 and no node lives, or until the folder is gone."""
        try:
            self._bury()
            while not self._retired():
                self._tick()
        except FileNotFoundError:
            if self._folder.exists:
                raise
            _log.warning("the folder is gone")
        finally:
            for machine in self._machines.values():
                machine.end()
            self._grounds.close()

    def _bury(self) -> None:
        """Mark what an earlier daemon left as ended when that daemon was last seen, and see to it that it is."""
        last_seen = datetime.fromtimestamp(os.fstat(self._lock).st_mtime + _HEARTBEAT_S, timezone.utc)
        with self._folder.locked():
            left = [(name, n) for name in self._folder.groups() for n in self._folder.nodes(name) if n.alive]
        for name, record in left:
            while not node.sweep(record.id):
                _log.error("%s does not end", record.id)
            self._save_end(name, record.id, EndCause.CRASH, max(record.launched_at, min(last_seen, _now())))
        self._folder.daemon_pid.write_text(f"{os.getpid()}\n")

    def _retired(self) -> bool:
        if self._machines or any(group.size for group in self._groups.values()):
            return False
        # Under the lock: a change is either seen here, or its author finds the daemon's lock free and starts another.
        with self._folder.locked():
            self._load()
            if any(group.size for group in self._groups.values()):
                return False
            os.close(self._lock)
            return True

    def _tick(self) -> None:
        self._write_heartbeat()
        if self._folder.changes() != self._seen:
            with self._folder.locked():
                self._load()
        for machine in list(self._machines.values()):
            self._observe(machine)
        for name in list(self._groups):
            self._settle(name)
        for machine in list(self._machines.values()):
            self._carry_out(machine)
        self._wait()

    def _write_heartbeat(self) -> None:
        now = time.monotonic()
        if now - self._heartbeat_at >= _HEARTBEAT_S:
            os.utime(self._lock)
            self._heartbeat_at = now

    def _load(self) -> None:
        self._seen = self._folder.changes()
        self._settings = self._folder.settings()
        found = ((name, self._folder.group(name)) for name in self._folder.groups())
        self._groups = {name: group for name, group in found if group is not None}
        for machine in self._machines.values():
            machine.group = self._groups.get(machine.group.name, machine.group)
            record = self._folder.node(machine.group.name, machine.record.id)
            # A group that was removed by hand takes its nodes with it.
            machine.record = record or replace(machine.record, ending=EndCause.CHOICE)

    def _observe(self, machine: Machine) -> None:
        record = machine.record
        if machine.died and record.ending is None:
            self._change(machine, replace(record, ending=EndCause.CRASH))
            if record.state is NodeState.PENDING:
                self._paused[machine.group.name] = time.monotonic() + _PAUSE_S
            _log.warning("%s died by itself", record.id)
        elif record.state is NodeState.PENDING and machine.greets():
            self._change(machine, replace(record, state=NodeState.RUNNING))
        elif machine.group.user_data and record.user_data_exit is None:
            code = machine.user_data_exit()
            if code is not None:
                self._change(machine, replace(record, user_data_exit=code))

    def _change(self, machine: Machine, wanted: NodeRecord) -> None:
        """Write what the daemon alone decides: state, exit code and, unless there is one, the cause of the end."""
        with self._folder.locked():
            now = self._folder.node(machine.group.name, wanted.id)
            if now is None:
                return
            machine.record = replace(
                now,
                state=wanted.state,
                ending=now.ending or wanted.ending,
                user_data_exit=wanted.user_data_exit,
            )
            self._folder.save_node(machine.group.name, machine.record)

    def _settle(self, name: str) -> None:
        group = self._groups[name]
        machines = self._of(name)
        step = settle(group, machines, _now())
        may_start = self._paused.get(name, 0.0) <= time.monotonic()
        if step.group == group and step.nodes == machines and not (step.starts and may_start):
            return
        with self._folder.locked():
            self._load()
            if name not in self._groups:
                return
            before = self._of(name)
            step = settle(self._groups[name], before, _now())
            for old, new in zip(before, step.nodes, strict=True):
                if old != new:
                    self._machines[new.id].record = new
                    self._folder.save_node(name, new)
            self._groups[name] = step.group
            self._folder.save_group(step.group)
            for _ in range(step.starts if may_start else 0):
                if not self._start(name):
                    break

    def _of(self, name: str) -> tuple[NodeRecord, ...]:
        return tuple(machine.record for machine in self._machines.values() if machine.group.name == name)

    def _start(self, name: str) -> bool:
        """Start one node; False when no GPUs are free for it, or there is no ground for it."""
        if self._has_no_spot(name):
            return False
        records = [machine.record for machine in self._machines.values()]
        devices = self._devices_for(name, records)
        if devices is None and self._devices.uuids:
            return False
        group = replace(self._groups[name], launched=self._groups[name].launched + 1, short_of=None)
        try:
            machine = Machine(self._folder, group, records, _now(), devices=devices, grounds=self._grounds)
        except ProvisionError as error:
            _log.error("no node of %s can start: %s", name, error)
            self._paused[name] = time.monotonic() + _PAUSE_S
            self._note_shortage(self._groups[name], str(error))
            return False
        self._groups[name] = group
        self._machines[machine.record.id] = machine
        self._folder.save_group(group)
        self._folder.save_node(name, machine.record)
        server = self._settings.server or node.server_command()
        try:
            machine.start(server, self._pipe)
        except OSError as error:  # seen as a node that died while it booted
            _log.error("%s cannot start: %s", machine.record.id, error)
        self._selector.register(machine.metadata, selectors.EVENT_READ, machine.metadata)
        _log.info("%s launched in %s at %s:%d", machine.record.id, name, machine.record.address, machine.record.port)
        return True

    def _has_no_spot(self, name: str) -> bool:
        """Whether the group's machines are to be spot machines, in the time that a rehearsal has none."""
        group, until = self._groups[name], self._settings.no_spot_until
        if until is None or _now() >= until or group.pool is None or group.pool.market is not Market.SPOT:
            return False
        self._paused[name] = time.monotonic() + _PAUSE_S / 10
        why = f"there are no spot machines until {until:%H:%M:%S} UTC, as was asked for"
        self._note_shortage(group, why, code="InsufficientInstanceCapacity")
        return True

    def _devices_for(self, name: str, records: list[NodeRecord]) -> tuple[str, ...] | None:
        """Return GPUs that no other node has; None when there are too few, or none on this machine at all."""
        group = self._groups[name]
        if not self._devices.uuids or group.pool is None:
            return None
        wanted = gpus_of(group.pool.instance_type)
        free = self._devices.free(wanted, {uuid for record in records for uuid in record.devices})
        if free is None:
            self._paused[name] = time.monotonic() + _PAUSE_S / 10
            if not any(record.ending or record.interrupted_at for record in self._of(name)):  # one that ends makes room
                there = len(self._devices.uuids)
                self._note_shortage(group, f"a node needs {wanted} GPUs; those of this machine ({there}) are in use")
        return free

    def _note_shortage(self, group: GroupRecord, message: str, code: str = NO_GPUS) -> None:
        short = ShortOf(message=message, at=_now(), pool=group.pool, code=code)
        self._groups[group.name] = replace(group, short_of=short)
        self._folder.save_group(self._groups[group.name])

    def _carry_out(self, machine: Machine) -> None:
        record = machine.record
        if record.ending is None:
            try:
                machine.follow_drills()
            except ProvisionError as error:  # seen as a node that died, if its ground did
                _log.error("%s: %s", record.id, error)
            return
        self._selector.unregister(machine.metadata)
        if not machine.end():
            self._selector.register(machine.metadata, selectors.EVENT_READ, machine.metadata)
            _log.error("%s does not end", record.id)
            return
        del self._machines[record.id]
        living = {machine.pid for machine in self._machines.values() if machine.pid}
        node.end_orphans(living | self._grounds.pids)
        self._save_end(machine.group.name, record.id, record.ending, _now())
        _log.info("%s ended: %s", record.id, record.ending.value)

    def _save_end(self, name: str, node_id: str, cause: EndCause, at: datetime) -> None:
        with self._folder.locked():
            group, record = self._folder.group(name), self._folder.node(name, node_id)
            if group is not None and record is not None:
                record = replace(record, ending=record.ending or cause)
                self._folder.save_node(name, ended(record, group, at))

    def _wait(self) -> None:
        booting = any(machine.record.state is NodeState.PENDING for machine in self._machines.values())
        for key, _ in self._selector.select(_BOOTING_TICK_S if booting else _TICK_S):
            key.data.handle_request()


def _now() -> datetime:
    return datetime.now(timezone.utc)


def keep(arguments: Sequence[str], grounds: Grounds) -> None:
    """Run the daemon; both options are required, `--lock` is the descriptor of its locked lock file."""
    parser = argparse.ArgumentParser(prog="gpucloud.adapters.local.daemon")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--lock", type=int, required=True)
    options = parser.parse_args(arguments)
    os.umask(0o077)
    processes.adopt_orphans()
    os.set_inheritable(options.lock, False)  # noqa: FBT003  (positional in the standard library)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    Daemon(Folder(options.root), options.lock, grounds).run()


if __name__ == "__main__":
    keep(sys.argv[1:], Loopback())
