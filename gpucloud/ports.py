"""What the use cases need from the world, in our words; adapters implement these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime
    from decimal import Decimal
    from pathlib import Path

    from gpucloud.domain.job.data import DataSet, DataWanted
    from gpucloud.domain.job.spec import Market, Resources
    from gpucloud.domain.market.catalog import Caller, Headroom, QuotaRequest, SpotList
    from gpucloud.domain.market.learned import Tables
    from gpucloud.domain.market.policies import Task
    from gpucloud.domain.market.recordings import RecordedMarket
    from gpucloud.domain.money.costs import Billed
    from gpucloud.domain.node.node import GroupView, Node
    from gpucloud.domain.offer import EfaLayout, Offer, Pool, PricePoint
    from gpucloud.domain.state.state import Attempt, MissingOutput
    from gpucloud.domain.supervision.strays import Owner, Thing


class Clock(Protocol):
    """Time and waiting; the only `now` and `sleep` that use cases know."""

    def now(self) -> datetime:
        """Return the time, aware, UTC."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """What a Terraform module is given; the same variables for every cloud, none of them secret.

    `group` is the node group's name for the `NodeGroup` port: of a cloud with regions `<region>/<name>`, of the
    embedded fleet `<whose>/<name>` (`domain/node/node.Fleet`), else `name`.
    `image` is the machine image that the job is pinned to in this region, `efa` the layouts of EFA interfaces
    that its types have, `data` what machines may read (`s3://bucket/prefix`). `unattended`: its machines drive the job.
    """

    name: str
    region: str
    zones: tuple[str, ...]
    node_type: str
    market: Market
    tags: tuple[tuple[str, str], ...]
    public_key: str
    store: str
    image: str | None = None
    efa: tuple[EfaLayout, ...] = ()
    data: tuple[str, ...] = ()
    unattended: bool = False


class Provisioner(Protocol):
    """Terraform, or the embedded cloud's own function where Terraform is absent. Raises ProvisionError."""

    def group(self, name: str, region: str) -> str:
        """Return the name that the cluster's node group has or will have; asks nobody."""
        ...

    def image(self, region: str) -> str | None:
        """Return the machine image that a job would be pinned to now; None where the cloud has none to choose."""
        ...

    def ensure(self, spec: ClusterSpec, *, story: Callable[[str], None]) -> str:
        """Make what costs nothing (a node group of size 0) and return the group's name; may be repeated."""
        ...

    def destroy(self, group: str, *, story: Callable[[str], None]) -> None:
        """Remove everything that `ensure` made for this group; what is gone already is no error."""
        ...


class NodeGroup(Protocol):
    """A group of nodes whose size is a level. Every call may be repeated. Raises ProvisionError, CredentialsError.

    That the cloud has no machines of a pool, or may not start them, is no error of a call: it is a refusal in the view.
    No node's id is ever used again, even by a group of the same name that is made anew.
    """

    def describe(self, group: str) -> GroupView:
        """Return the group as the cloud lists it now; `exists=False` when there is none."""
        ...

    def arm(self, group: str, until: datetime) -> None:
        """Set the shut-off: at `until` the cloud sets the size to 0 and ends every node, by itself.

        It goes on doing so after that time: a level that is raised later, by whoever could, is lowered again.
        """
        ...

    def resize(self, group: str, size: int, pool: Pool, *, cap_usd_per_hour: Decimal | None = None) -> None:
        """Set the level: until `size` unrelieved ones live, nodes of `pool` are started, or some are ended.

        Those of another pool are ended first, then the newest; those that stay keep the market in which they were
        started. None is started with less time ahead of the shut-off than the cloud may be late with it. Where the
        cloud can, it keeps the price of what it starts at or below the cap.
        """
        ...

    def relieve(self, group: str, node_id: str, *, cap_usd_per_hour: Decimal | None = None) -> None:
        """Count a node that is being taken no more: the level starts another one now, of its pool, as `resize` does.

        It stays in the group, and the shut-off ends it with the others: that it is being taken is its own word.
        """
        ...

    def terminate(self, group: str, node_id: str, *, bad: bool = False) -> None:
        """End one node by choice; the level starts another one unless it was lowered.

        `bad`: its machine is not to come back, where the group could choose it again. Nothing of the job runs on a
        machine that has ended, also where the machine itself goes on.
        """
        ...

    def purge(self, group: str, *, keep: tuple[tuple[str, str], ...] = ()) -> None:
        """Set the level to 0, end every node, and return when none is alive.

        `keep` names nodes, each with a folder below its root that stays where the machine itself goes on.
        """
        ...

    def interrupt(self, group: str, node_id: str, *, notice: bool) -> str | None:
        """Take a node as the cloud would, as a drill: at once, or some seconds after a notice.

        Where the cloud gives no notice it lives on that long untold. ProvisionError where the cloud does not take it:
        nothing was begun then. Returns None, or what is not known of a drill that the cloud may have begun.
        """
        ...


class MarketData(Protocol):
    """Prices."""

    def offers(self, wanted: Resources) -> tuple[Offer, ...]:
        """Return offers with their prices now; those that cannot match may be left out."""
        ...

    def prices(self, pool: Pool, start: datetime, end: datetime) -> tuple[PricePoint, ...]:
        """Return the pool's price points that cover start..end, in order; the first is at or before `start`.

        UsageError for a pool that is not in the market.
        """
        ...


class Markets(Protocol):
    """Recorded spot markets. Raises UsageError."""

    def names(self) -> tuple[str, ...]:
        """Return the markets' names, in order."""
        ...

    def market(self, name: str) -> RecordedMarket:
        """Return the market of that name; UsageError, with the nearest name, when there is none."""
        ...


class PolicyTables(Protocol):
    """What the learned policy looks its choices up in."""

    def tables(self, task: Task, zones: int, gpus: int, spot_usd_per_hour: float) -> Tables:
        """Return the best acts for the task; takes seconds.

        Its machines have so many GPUs each, and there may be spot machines in so many zones at about that price.
        """
        ...


class SpotQuotes(Protocol):
    """Spot prices of many machines at once. Raises CredentialsError, ProvisionError."""

    def spot_lists(self, regions: tuple[str, ...], names: tuple[str, ...]) -> Mapping[str, SpotList]:
        """Return the spot prices of these types now, by region; one that cannot be asked is left out."""
        ...


class Account(Protocol):
    """Who the caller is to the cloud, and how much the cloud lets it rent. Raises CredentialsError, ProvisionError."""

    def caller(self) -> Caller:
        """Return who the caller is; CredentialsError within 3 s when the cloud does not know it."""
        ...

    def headroom(self, offer: Offer) -> Headroom:
        """Return the quota that machines of this offer count against, with what is used of it now."""
        ...

    def ask_for_more(self, headroom: Headroom, vcpus: int) -> QuotaRequest:
        """Ask the cloud to raise a quota to `vcpus`; an open request for as much is returned as it stands."""
        ...

    def requests(self, region: str) -> tuple[QuotaRequest, ...]:
        """Return the requests made in the region, the newest first."""
        ...


class BillingData(Protocol):
    """What the cloud itself says that was spent. Each question costs money. Raises CredentialsError, ProvisionError."""

    def of_job(self, job: str, first: datetime, now: datetime) -> Billed:
        """Return the cloud's figures for the job's machines and what stands beside them, from the first's day on."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """A remote command that ended."""

    exit_code: int
    stdout: bytes
    stderr: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PortForward:
    """A port of this machine, and what a node connects who connects to it with."""

    bind: str = "127.0.0.1"
    """The address of this machine that is listened on."""
    port: int
    host: str = "localhost"
    """As the node calls it."""
    host_port: int


class Host(Protocol):
    """One node over SSH. Raises HostUnreachable, HostKeyMismatch."""

    node: Node

    def run(self, argv: tuple[str, ...], *, stdin: bytes = b"", timeout_s: float = 30.0) -> Completed:
        """Run argv (quoted word by word, never a shell string) and return when it ended."""
        ...

    def sync(self, root: Path, target: str) -> str:
        """Make `<target>/<sha256 of manifest>` equal to the tree at `root`; return that path (ignore files count)."""
        ...

    def interact(self, argv: tuple[str, ...], forwards: tuple[PortForward, ...] = ()) -> int:
        """Connect this terminal to a remote shell (or argv) and return its exit code; ports lead there meanwhile."""
        ...

    def renew(self) -> None:
        """Log in anew for what is run from now on: groups and limits count from a login; what runs goes on."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


class Shell(Protocol):
    """Opens hosts; keeps one connection to each, checks that it answers, and reopens it when it was lost."""

    def host(self, node: Node) -> Host:
        """Return the node's host, connected within the deadline, its key pinned."""
        ...

    def close(self) -> None:
        """Close every connection."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """What became of a job's outputs: where they are now, and what of them is missing.

    `size` is how many bytes came, without those that were here already; `set_aside` are files that lay in the place of
    others and differed, by the names that they have now. `renamed` are those that the disk takes for others' names, and
    what came has instead.
    """

    paths: tuple[str, ...] = ()
    size: int = 0
    set_aside: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    missing: tuple[MissingOutput, ...] = ()


class Outputs(Protocol):
    """Takes a job's results home."""

    def bring_home(
        self,
        host: Host,
        code: str,
        attempt: int,
        moves: Callable[[], None] | None = None,
        paths: tuple[str, ...] = (),
    ) -> Brought:
        """Copy the outputs from the folder `code` on the host; what is not there is no error. NodeError, StoreError.

        `paths` are outputs too: those of the job file that the attempt was started under.
        What lies in the place of a file of that attempt, and differs, is set aside. `moves` is called whenever
        something has arrived; what it raises ends the copy.
        """
        ...

    def note(self, attempt: Attempt, missing: tuple[MissingOutput, ...], began: datetime) -> None:
        """Note beside them that the attempt's outputs came home, and without what; where that fails, nothing is.

        `began`: when the run's first attempt did; what lay there before is none of the run's.
        """
        ...

    def came(self, attempt: Attempt) -> tuple[MissingOutput, ...] | None:
        """Return what was noted as missing of the attempt's outputs; None where that they came is not."""
        ...

    def bring_profile(self, host: Host, attempt: int) -> tuple[str, ...]:
        """Copy what profilers recorded on the host in that attempt; return where it is now. NodeError, StoreError."""
        ...


class DataSets(Protocol):
    """Where data sets come from. Raises StoreError, UsageError."""

    def listed(self, source: str) -> DataSet:
        """Return what lies at `s3://bucket/prefix`, or at a path of this machine, now."""
        ...

    def send(self, host: Host, wanted: DataWanted, folder: str, missing: tuple[str, ...]) -> None:
        """Put files of a set that lies on this machine into `folder` on the host, each whole; may be repeated."""
        ...


class Census(Protocol):
    """Everything of a cloud that may be gpucloud's, by its tags. Raises CredentialsError, ProvisionError."""

    @property
    def account(self) -> str:
        """Whose cloud it is."""
        ...

    @property
    def regional(self) -> bool:
        """Whether a cluster is of one region."""
        ...

    @property
    def regions(self) -> tuple[str, ...]:
        """Which regions are looked at; empty where the cloud has none."""
        ...

    def things(self) -> tuple[Thing, ...]:
        """Return what is there and bears any of gpucloud's cluster tags; what has ended costs nothing and is left out.

        What stands without any job (`base`) is none of it.
        """
        ...

    def remove(self, cluster: str, region: str, things: tuple[Thing, ...], *, story: Callable[[str], None]) -> None:
        """End the machines of the cluster in that region and remove everything else of it; may be repeated."""
        ...


class Sightings(Protocol):
    """When strays were first seen as such, from one run to the next. Raises StoreError."""

    def load(self, owner: Owner) -> Mapping[str, datetime]:
        """Return what was kept for this owner, by `Thing.key`."""
        ...

    def save(self, owner: Owner, first_seen: Mapping[str, datetime]) -> None:
        """Keep it."""
        ...


class Signer(Protocol):
    """The user's own key, with which orders are signed."""

    @property
    def key_id(self) -> str:
        """The key's fingerprint, which no other key can have."""
        ...

    def sign(self, data: bytes) -> bytes:
        """Return the signature of these very bytes."""
        ...


class Trust(Protocol):
    """Whose signatures count; the list is the user's, never the store's."""

    def verify(self, data: bytes, key_id: str, signature: bytes) -> str | None:
        """Return whose key signed these very bytes; None where it is not trusted, or the signature is not its."""
        ...

    def name_of(self, key_id: str) -> str | None:
        """Return whose key has that fingerprint, None for none that is trusted: anybody can name one."""
        ...


# A chart as data: what is drawn where, whoever draws it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line through (x, y); `upper`, if given, holds a second y each, up to which the space is shaded."""

    label: str
    points: tuple[tuple[float, float], ...]
    upper: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One panel. The axes' labels name their units; `limit` is a labelled line across, such as a budget."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    limit: tuple[str, float] | None = None
