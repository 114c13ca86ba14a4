"""Own hosts as a cloud: nothing to make, the price that the user names, and each host as SSH reaches it."""

from __future__ import annotations

import getpass
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from pathlib import Path

from gpucloud.adapters.hosts.group import SshNodeGroup
from gpucloud.adapters.hosts.records import POOL, Place, Recollection
from gpucloud.domain.errors import HostKeyMismatch
from gpucloud.domain.job.quantities import format_moment
from gpucloud.domain.job.spec import OwnHost, Resources, SshChoices
from gpucloud.domain.offer import Offer, Pool, PricePoint
from gpucloud.ports import Clock, ClusterSpec


class SshMarket:
    """Implements `MarketData`: one offer at one price. `check` raises when the hosts cannot be used at all.

    What is asked of the GPUs is taken as given: the node's own facts and the gate hold it against what is there.
    """

    def __init__(self, usd_per_hour: Decimal, clock: Clock, check: Callable[[], object]) -> None:
        self._usd_per_hour = usd_per_hour
        self._clock = clock
        self._check = check

    def offers(self, wanted: Resources) -> tuple[Offer, ...]:
        """Return the one offer."""
        self._check()
        offer = Offer(
            pool=POOL,
            usd_per_hour=self._usd_per_hour,
            cap_usd_per_hour=self._usd_per_hour,
            as_of=self._clock.now(),
            gpus=wanted.gpus,
            gpu=wanted.gpu[0] if wanted.gpu else None,
            vram_gib=wanted.vram_gib,
        )
        return (offer,)

    def prices(self, pool: Pool, start: datetime, end: datetime) -> tuple[PricePoint, ...]:  # noqa: ARG002
        """Return the price, which does not change."""
        return (PricePoint(since=start, usd_per_hour=self._usd_per_hour),)


# What there is to make for own hosts: the record of who has them.


class SshProvisioner:
    """Implements `Provisioner`: hosts are there already."""

    def __init__(self, records: Recollection, group: SshNodeGroup) -> None:
        self._records = records
        self._group = group

    def group(self, name: str, region: str) -> str:  # noqa: ARG002  hosts have no region
        """Return the cluster's own name."""
        return name

    def image(self, region: str) -> None:
        """Return None: hosts have what they have."""

    def ensure(self, spec: ClusterSpec, *, story: Callable[[str], None]) -> str:
        """Make the record and return the group's name; there is nothing to tell."""
        del story
        return self._records.make(spec.name).name

    def destroy(self, group: str, *, story: Callable[[str], None]) -> None:
        """Free what is taken, and forget the group; hosts that cannot be asked are named."""
        if self._records.read(group) is None:
            return
        self._group.purge(group)
        uncleared, now = self._group.uncleared(group), self._records.now()
        for node_id, until in uncleared:
            ends = format_moment(until, now, seconds=False) if until is not None else None
            runs = f"what runs there ends by itself by {ends}, and has its GPUs until then; " if ends else ""
            story(f"{node_id} does not answer: {runs}files of the job may be left there, below ~/.gpucloud/jobs")
        record = self._records.read(group)
        is_kept = record is not None and any(node.keeps for node in record.nodes)
        but = ", but for results that did not come home" if is_kept else ""
        self._records.remove(group)
        free = "all are free" if all(until is None for _, until in uncleared) else "all that answer are free"
        story(
            f"own hosts: {free}, and the job's files are removed on those that answer{but}; software that was"
            " installed for it stays in ~/.gpucloud there, for jobs to come"
        )


# The job file's hosts as SSH reaches them: name, login, pinned key, way.


@dataclass(frozen=True, slots=True, kw_only=True)
class Configured:
    """What SSH's own configuration says of a host; what is None is not said."""

    address: str | None = None
    user: str | None = None
    port: int | None = None
    jump: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where what the job file leaves out comes from. `key_of` gives the accepted key of an address and port."""

    configured: Callable[[str], Configured]
    key_of: Callable[[str, int], str | None]
    known_hosts: Path


def places(choices: SshChoices, sources: Sources) -> tuple[Place, ...]:
    """Return the hosts in the file's order. HostKeyMismatch naming every host whose key nobody has accepted."""
    found, unknown = [], []
    for name, host in zip(_names(choices.hosts), choices.hosts, strict=True):
        said = sources.configured(host.address)
        address = said.address or host.address
        port = said.port if said.port is not None and host.port == _USUAL_PORT else host.port
        key = host.host_key or sources.key_of(host.address, port) or sources.key_of(address, port)
        if key is None:
            unknown.append((address, port))
            continue
        found.append(
            Place(
                name=name,
                address=address,
                port=port,
                user=host.user or said.user or getpass.getuser(),
                host_key=key,
                proxy=_proxy(host.jump or said.jump, address, port, choices.key, sources.known_hosts),
                private_address=host.private_address,
                interface=host.interface,
                devices=tuple(str(index) for index in host.gpus),
            )
        )
    if unknown:
        raise _not_accepted(unknown, sources.known_hosts)
    return tuple(found)


_USUAL_PORT = OwnHost(address="").port


def _not_accepted(hosts: list[tuple[str, int]], file: Path) -> HostKeyMismatch:
    names = ", ".join(address if port == _USUAL_PORT else f"{address}:{port}" for address, port in hosts)
    address, port = hosts[0]
    made = "" if file.parent.is_dir() else f"mkdir -p -m 700 {file.parent}; "
    return HostKeyMismatch(
        f"the host key of {names} is not known; nothing was sent",
        hint=f"{made}ssh-keyscan -p {port} {address} | tee -a {file} | ssh-keygen -lf - and compare with"
        " ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub there; or `host_key: ssh-ed25519 AAAA…` in the job file",
    )


def _names(hosts: tuple[OwnHost, ...]) -> tuple[str, ...]:
    """Return a name of its own for each entry: address, port unless it is the usual one, GPUs where that is shared."""
    short = [_name(host) for host in hosts]
    long = [f"{name}-g{'-'.join(map(str, host.gpus))}" for name, host in zip(short, hosts, strict=True)]
    times = Counter(short)
    return tuple(name if times[name] == 1 else full for name, full in zip(short, long, strict=True))


def _name(host: OwnHost) -> str:
    name = re.sub(r"[^A-Za-z0-9.]+", "-", host.address).strip("-")
    return name if host.port == _USUAL_PORT else f"{name}-p{host.port}"


def _proxy(jump: str | None, address: str, port: int, key: Path | None, known_hosts: Path) -> tuple[str, ...]:
    """Return the way through other hosts: OpenSSH's own, which knows the user's agent and settings for them.

    Their keys must have been accepted as well: it never asks and never trusts at first sight.
    """
    if jump is None:
        return ()
    *before, last = [hop.strip() for hop in jump.split(",")]
    m = re.search(r":(\d+)$", last)
    login, jump_port = (last[: m.start()], m[1]) if m else (last, None)
    target = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    strict = ("BatchMode=yes", "StrictHostKeyChecking=yes", f"UserKnownHostsFile={known_hosts}", "ConnectTimeout=10")
    return (
        *("ssh", "-W", target, *(word for option in strict for word in ("-o", option))),
        *(("-i", str(key)) if key is not None else ()),
        *(("-J", ",".join(before)) if before else ()),
        *(("-p", jump_port) if jump_port else ()),
        *("--", login),  # what follows is a host's name, whatever it begins with
    )
