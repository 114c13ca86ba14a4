"""What every `NodeGroup` promises: the fake, the embedded cloud, own hosts, the emulated AWS in two ways to launch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from gpucloud.adapters.aws.nodes.listing import LEAST_AHEAD
from gpucloud.adapters.hosts.cloud import SshProvisioner
from gpucloud.adapters.hosts.group import Asking, SshNodeGroup
from gpucloud.adapters.hosts.records import POOL as HOSTS
from gpucloud.adapters.hosts.records import Recollection
from gpucloud.adapters.ssh.shell import SshShell
from gpucloud.domain.errors import ProvisionError
from gpucloud.domain.job.spec import Market
from gpucloud.domain.node.node import EndCause, Fault, GroupView, Node, NodeState
from gpucloud.domain.offer import Pool
from gpucloud.ports import Clock, NodeGroup
from gpucloud.store import open_store
from tests.emulation.group import own_spaces
from tests.fakes.node_group import FakeNodeGroup
from tests.standins import aws_group
from tests.standins.embedded import make_cloud, spec_of
from tests.standins.own_hosts import OwnHosts, own_hosts

POOL = Pool(instance_type="local.p3.2xlarge", zone="us-east-2a", market=Market.SPOT)
OTHER_POOL = Pool(instance_type="local.p2.xlarge", zone="us-east-2b", market=Market.ON_DEMAND)


class WallClock:
    def now(self) -> datetime:
        return datetime.now(timezone.utc)

    def sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))  # on a busy machine the moment may have passed


class SteppedClock:
    def __init__(self) -> None:
        self._now = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)

    def now(self) -> datetime:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += timedelta(seconds=seconds)


@dataclass
class Cloud:
    """One implementation with an empty group in it.

    `second`: what its times are rounded down by; `lag`: how late a shut-off may be seen; `ahead`: with how much less
    before it nothing is started. `take` takes a machine without notice.
    """

    nodes: NodeGroup
    clock: Clock
    group: str = "gpucloud-contract"
    absent: str = "gpucloud-other"
    pool: Pool = POOL
    other_pool: Pool = OTHER_POOL
    second: timedelta = timedelta(0)
    lag: timedelta = timedelta(0)
    ahead: timedelta = timedelta(0)
    taking: Callable[[str], None] | None = None

    def take(self, node: Node) -> None:
        """Have the cloud take the node without a notice: AWS does so, and has no call for it."""
        if self.taking is None:
            self.nodes.interrupt(self.group, node.id, notice=False)
        else:
            self.taking(node.id)

    def soon(self, seconds: float) -> datetime:
        """Arm the group so that it is shut off in that time, or up to a second later where times are whole seconds."""
        return self.arm(seconds + self.second.total_seconds())

    def until(self, wanted: Callable[[GroupView], bool], limit_s: float = 15.0) -> GroupView:
        """Return the first listing that is as wanted."""
        deadline = self.clock.now() + timedelta(seconds=limit_s)
        while not wanted(view := self.nodes.describe(self.group)):
            assert self.clock.now() < deadline, f"never so; last seen: {view}"
            self.clock.sleep(0.01)
        return view

    def arm(self, seconds: float = 600.0) -> datetime:
        until = self.clock.now() + timedelta(seconds=seconds)
        self.nodes.arm(self.group, until)
        return until

    def started(self, size: int) -> tuple[Node, ...]:
        """Arm, set the level and return the nodes once they run."""
        self.arm()
        self.nodes.resize(self.group, size, self.pool)
        return running(self.until(lambda view: len(running(view)) == size))


def running(view: GroupView) -> tuple[Node, ...]:
    return tuple(node for node in view.nodes if node.state is NodeState.RUNNING)


def find(view: GroupView, node: Node) -> Node:
    (found,) = (n for n in view.nodes if n.id == node.id)
    return found


def ended(node: Node) -> Callable[[GroupView], bool]:
    return lambda view: find(view, node).state is NodeState.TERMINATED


def fake(path: Path) -> Iterator[Cloud]:
    clock = SteppedClock()
    nodes = FakeNodeGroup(clock, notice_s=1.0, boot_s=0.2)
    cloud = Cloud(nodes, clock)
    nodes.create(cloud.group)
    yield cloud


def embedded(path: Path) -> Iterator[Cloud]:
    cloud = Cloud(make_cloud(path / "cloud", Cloud.group), WallClock())
    yield cloud
    cloud.nodes.purge(cloud.group)


def embedded_with_own_spaces(path: Path) -> Iterator[Cloud]:
    cloud = Cloud(make_cloud(path / "cloud", Cloud.group, daemon=own_spaces()), WallClock())
    yield cloud
    cloud.nodes.purge(cloud.group)


def aws(path: Path, *, has_launch_instances: bool = True) -> Iterator[Cloud]:
    with aws_group.rented(path / "lab", notice_s=2.0) as lab:
        lab.has_launch_instances = has_launch_instances
        cloud = Cloud(
            aws_group.Rig(lab).group(),
            WallClock(),
            group=aws_group.GROUP,
            absent="us-east-1/gpucloud-other",
            pool=aws_group.SPOT,
            other_pool=aws_group.ON_DEMAND,
            second=timedelta(seconds=1),
            lag=timedelta(seconds=5),
            ahead=LEAST_AHEAD,
            taking=lab.take,
        )
        yield cloud
        cloud.nodes.purge(cloud.group)


def aws_by_its_level(path: Path) -> Iterator[Cloud]:
    yield from aws(path, has_launch_instances=False)


MACHINES = 5
"""Of a group of fixed size: no more can be had, and that is enough for every test here."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnHosts]:
    with own_hosts(tmp_path_factory.mktemp("servers"), MACHINES) as found:
        yield found


def hosts(path: Path, servers: OwnHosts) -> Iterator[Cloud]:
    records = Recollection(open_store(str(path / "store")), WallClock())
    asking = Asking(lambda: SshShell(servers.key))
    nodes = SshNodeGroup(records, asking, servers.places, drill_s=0.5)
    cloud = Cloud(nodes, WallClock(), pool=HOSTS, other_pool=HOSTS)
    SshProvisioner(records, nodes).ensure(spec_of(cloud.group), story=print)
    yield cloud
    cloud.nodes.purge(cloud.group)


EMULATED = pytest.mark.emulated
FIXED_SIZE = [pytest.param(hosts, id="hosts")]
"""Those whose machines are there already, MACHINES of them."""


@pytest.fixture(
    params=[
        fake,
        embedded,
        embedded_with_own_spaces,
        hosts,
        pytest.param(aws, marks=EMULATED),
        pytest.param(aws_by_its_level, marks=EMULATED),
    ],
    ids=["fake", "embedded", "embedded-a", "hosts", "aws", "aws-desired"],
)
def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cloud]:
    if request.param is hosts:
        yield from hosts(tmp_path, request.getfixturevalue("servers"))
    else:
        yield from request.param(tmp_path)


def test_a_group_that_was_never_made_does_not_exist_and_has_nothing_to_purge(cloud: Cloud) -> None:
    cloud.nodes.purge(cloud.absent)
    assert cloud.nodes.describe(cloud.absent) == GroupView(exists=False, size=0, armed_until=None, nodes=())


def test_a_group_that_was_never_made_cannot_be_armed_or_sized(cloud: Cloud) -> None:
    with pytest.raises(ProvisionError):
        cloud.nodes.arm(cloud.absent, cloud.clock.now())
    with pytest.raises(ProvisionError):
        cloud.nodes.resize(cloud.absent, 0, cloud.pool)


def test_a_new_group_costs_nothing(cloud: Cloud) -> None:
    assert cloud.nodes.describe(cloud.group) == GroupView(exists=True, size=0, armed_until=None, nodes=())


def test_no_node_starts_before_the_shut_off_is_armed(cloud: Cloud) -> None:
    with pytest.raises(ProvisionError):
        cloud.nodes.resize(cloud.group, 1, cloud.pool)
    cloud.nodes.arm(cloud.group, cloud.clock.now() - timedelta(seconds=1))
    with pytest.raises(ProvisionError):
        cloud.nodes.resize(cloud.group, 1, cloud.pool)
    assert cloud.nodes.describe(cloud.group).nodes == ()


def test_the_shut_off_time_can_be_read_back_and_is_the_last_one_that_was_set(cloud: Cloud) -> None:
    for seconds in (600, 900, 300):
        until = cloud.arm(seconds)
        armed = cloud.nodes.describe(cloud.group).armed_until
        assert armed is not None
        assert timedelta(0) <= until - armed <= cloud.second


def test_the_level_is_reached_with_nodes_that_differ(cloud: Cloud) -> None:
    before = cloud.clock.now()
    nodes = cloud.started(2)
    assert cloud.nodes.describe(cloud.group).size == 2
    assert len({node.id for node in nodes}) == 2
    assert len({(node.address, node.port) for node in nodes}) == 2
    assert len({node.host_key for node in nodes}) == 2
    for node in nodes:
        assert node.pool == cloud.pool
        assert before - cloud.second <= node.launched_at <= cloud.clock.now()
        assert node.host_key is not None
        assert node.host_key.startswith("ssh-ed25519 ")
        assert (node.relieved, node.ended_at, node.end_cause) == (False, None, None)


def test_setting_the_same_level_again_changes_nothing(cloud: Cloud) -> None:
    nodes = cloud.started(2)
    cloud.nodes.resize(cloud.group, 2, cloud.pool)
    cloud.clock.sleep(0.2)
    assert cloud.nodes.describe(cloud.group).nodes == nodes


def test_a_lower_level_ends_the_newest_by_choice(cloud: Cloud) -> None:
    (old,) = cloud.started(1)
    cloud.nodes.resize(cloud.group, 2, cloud.pool)
    new = next(n for n in running(cloud.until(lambda view: len(running(view)) == 2)) if n.id != old.id)
    cloud.nodes.resize(cloud.group, 1, cloud.pool)
    view = cloud.until(ended(new))
    assert view.alive == (old,)
    assert find(view, new).end_cause is EndCause.CHOICE
    assert find(view, new).ended_at is not None


def test_a_lower_level_ends_machines_of_another_pool_first(cloud: Cloud) -> None:
    (old,) = cloud.started(1)
    cloud.nodes.resize(cloud.group, 2, cloud.other_pool)
    new = next(n for n in running(cloud.until(lambda view: len(running(view)) == 2)) if n.id != old.id)
    assert new.pool == cloud.other_pool
    cloud.nodes.resize(cloud.group, 1, cloud.other_pool)
    leaves, stays = (old, new) if old.pool != new.pool else (new, old)  # own hosts are one pool: there, the newest
    assert cloud.until(ended(leaves)).alive == (stays,)


def test_a_terminated_node_is_replaced_while_the_level_stands(cloud: Cloud) -> None:
    (first,) = cloud.started(1)
    cloud.nodes.terminate(cloud.group, first.id)
    view = cloud.until(lambda view: ended(first)(view) and len(running(view)) == 1)
    assert find(view, first).end_cause is EndCause.CHOICE
    assert view.alive[0].id != first.id


def test_a_relieved_node_is_ended_by_its_id_and_not_replaced(cloud: Cloud) -> None:
    old, _ = sorted(cloud.started(2), key=lambda node: node.launched_at)
    cloud.nodes.relieve(cloud.group, old.id)
    cloud.nodes.resize(cloud.group, 1, cloud.pool)
    cloud.nodes.terminate(cloud.group, old.id)
    view = cloud.until(lambda view: len(view.alive) == 1 and ended(old)(view))
    assert view.size == 1
    assert find(view, old).end_cause is EndCause.CHOICE


def test_a_relieved_node_lives_on_while_its_replacement_starts(cloud: Cloud) -> None:
    (old,) = cloud.started(1)
    cloud.nodes.relieve(cloud.group, old.id)
    view = cloud.until(lambda view: len(running(view)) == 2)
    assert [node.relieved for node in view.alive] == [True, False]


def test_a_relieved_node_is_not_ended_by_the_level_but_by_a_purge(cloud: Cloud) -> None:
    (old,) = cloud.started(1)
    cloud.nodes.relieve(cloud.group, old.id)
    cloud.nodes.resize(cloud.group, 0, cloud.pool)
    view = cloud.until(lambda view: all(node.id == old.id for node in view.alive))
    assert find(view, old).state is NodeState.RUNNING
    cloud.nodes.purge(cloud.group)
    assert cloud.nodes.describe(cloud.group).alive == ()


def test_a_node_with_a_notice_lives_until_it_is_taken_and_is_then_replaced(cloud: Cloud) -> None:
    (old,) = cloud.started(1)
    asked = cloud.clock.now()
    cloud.nodes.interrupt(cloud.group, old.id, notice=True)
    assert cloud.nodes.describe(cloud.group).alive == (old,)
    view = cloud.until(lambda view: ended(old)(view) and len(running(view)) == 1)
    taken = find(view, old)
    assert taken.end_cause is EndCause.INTERRUPTED
    assert taken.ended_at is not None
    assert taken.ended_at >= asked + timedelta(seconds=0.4)


def test_a_node_taken_without_notice_is_gone_and_replaced(cloud: Cloud) -> None:
    (old,) = cloud.started(1)
    cloud.take(old)
    view = cloud.until(lambda view: ended(old)(view) and len(running(view)) == 1)
    assert find(view, old).end_cause is EndCause.INTERRUPTED


def test_a_relieved_node_that_is_taken_leaves_the_level_as_it_was(cloud: Cloud) -> None:
    (old,) = cloud.started(1)
    cloud.nodes.relieve(cloud.group, old.id)
    cloud.until(lambda view: len(running(view)) == 2)
    cloud.take(old)
    cloud.until(ended(old))
    cloud.nodes.resize(cloud.group, 1, cloud.pool)
    view = cloud.until(lambda view: len(running(view)) == 1 and view.size == 1)
    cloud.clock.sleep(0.3)
    assert (cloud.nodes.describe(cloud.group).size, cloud.nodes.describe(cloud.group).alive) == (1, view.alive)


def test_a_relieved_node_keeps_the_level_from_more(cloud: Cloud) -> None:
    nodes = cloud.started(2)
    cloud.nodes.relieve(cloud.group, nodes[0].id)
    cloud.until(lambda view: len(running(view)) == 3)
    cloud.nodes.relieve(cloud.group, nodes[0].id)
    cloud.nodes.resize(cloud.group, 2, cloud.pool)
    cloud.clock.sleep(0.3)
    view = cloud.nodes.describe(cloud.group)
    assert (view.size, len(view.alive), len(view.counted)) == (2, 3, 2)


def test_the_shut_off_ends_every_node_by_itself_and_keeps_the_group_down_until_it_is_armed_anew(cloud: Cloud) -> None:
    relieved = cloud.started(2)[0]
    cloud.nodes.relieve(cloud.group, relieved.id)
    until = cloud.soon(0.3)
    view = cloud.until(lambda view: not view.alive and view.size == 0)  # a group and its nodes are asked for apart
    assert {node.end_cause for node in view.nodes} == {EndCause.SCHEDULE}
    assert all(node.ended_at is not None and node.ended_at <= until + cloud.lag for node in view.nodes)
    with pytest.raises(ProvisionError):
        cloud.nodes.resize(cloud.group, 1, cloud.pool)
    assert cloud.nodes.describe(cloud.group).size == 0
    (new,) = cloud.started(1)
    assert new.id not in {node.id for node in view.nodes}


def test_a_level_that_is_raised_with_too_little_time_ahead_is_refused_and_changes_nothing(cloud: Cloud) -> None:
    (node,) = cloud.started(1)
    if cloud.ahead > timedelta(0):  # as long as the cloud may be late with a shut-off
        cloud.arm(cloud.ahead.total_seconds() - 5)
        with pytest.raises(ProvisionError):
            cloud.nodes.resize(cloud.group, 2, cloud.pool)
        with pytest.raises(ProvisionError):
            cloud.nodes.relieve(cloud.group, node.id)
        view = cloud.nodes.describe(cloud.group)
        assert (view.size, [one.id for one in view.alive]) == (1, [node.id])
    cloud.arm(600)
    cloud.nodes.resize(cloud.group, 2, cloud.pool)
    assert len(cloud.until(lambda view: len(running(view)) == 2).alive) == 2


def test_a_later_shut_off_keeps_the_nodes(cloud: Cloud) -> None:
    nodes = cloud.started(1)
    until = cloud.soon(1.0)
    cloud.arm(600)
    cloud.clock.sleep((until - cloud.clock.now()).total_seconds() + 0.2)
    assert cloud.nodes.describe(cloud.group).alive == nodes


def test_after_a_purge_nothing_is_alive_and_the_ended_are_still_listed(cloud: Cloud) -> None:
    nodes = cloud.started(2)
    cloud.nodes.purge(cloud.group)
    view = cloud.nodes.describe(cloud.group)
    assert (view.size, view.alive) == (0, ())
    assert {node.id for node in view.nodes} == {node.id for node in nodes}
    assert {node.end_cause for node in view.nodes} == {EndCause.CHOICE}
    cloud.nodes.purge(cloud.group)
    assert cloud.nodes.describe(cloud.group) == view


def test_nothing_happens_to_a_node_that_has_ended(cloud: Cloud) -> None:
    (node,) = cloud.started(1)
    cloud.nodes.purge(cloud.group)
    view = cloud.nodes.describe(cloud.group)
    cloud.nodes.terminate(cloud.group, node.id)
    cloud.nodes.relieve(cloud.group, node.id)
    cloud.nodes.interrupt(cloud.group, node.id, notice=False)
    assert cloud.nodes.describe(cloud.group) == view


def test_a_node_that_never_was_is_an_error(cloud: Cloud) -> None:
    for act in (cloud.nodes.terminate, cloud.nodes.relieve):
        with pytest.raises(ProvisionError):
            act(cloud.group, "i-00000000000000000")


@pytest.mark.parametrize("cloud", FIXED_SIZE, indirect=True)
def test_more_machines_than_there_are_is_a_refusal_in_the_view_and_the_level_is_what_there_is(cloud: Cloud) -> None:
    cloud.arm()
    cloud.nodes.resize(cloud.group, MACHINES + 2, cloud.pool)
    view = cloud.nodes.describe(cloud.group)
    assert (view.size, len(view.alive)) == (MACHINES, MACHINES)
    assert [(refusal.pool, refusal.fault) for refusal in view.refusals] == [(cloud.pool, Fault.PARAMETER)]
    assert view.refusals[0].message.startswith(f"{MACHINES} of {MACHINES + 2} ")


@pytest.mark.parametrize("cloud", FIXED_SIZE, indirect=True)
def test_a_machine_that_comes_again_has_another_id(cloud: Cloud) -> None:
    first = cloud.started(2)
    cloud.nodes.purge(cloud.group)
    again = cloud.started(2)
    assert {(node.address, node.port) for node in again} == {(node.address, node.port) for node in first}
    assert not {node.id for node in again} & {node.id for node in first}
