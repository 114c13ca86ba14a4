"""Looking at nodes before an attempt, in the background: each one's GPUs, then the ways between them."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime

from gpucloud.domain.codec import Malformed, from_json, to_json
from gpucloud.domain.errors import NodeError
from gpucloud.domain.node.bootstrap.steps import gate_command
from gpucloud.domain.node.gate.gang import GangFacts, GangOrder, blame
from gpucloud.domain.node.gate.report import Finding, GateOrder, GateWanted, is_in_use, why
from gpucloud.domain.node.machine.facts import machine_wanted
from gpucloud.domain.node.member import candidates, common_port
from gpucloud.domain.supervision.action import Inspect
from gpucloud.domain.supervision.snapshot import Inspection, InUse, Snapshot
from gpucloud.usecases.services import Services
from gpucloud.usecases.supervise.bootstrap import Bootstrapped
from gpucloud.usecases.supervise.needs import gate_wanted, parse_checked
from gpucloud.usecases.supervise.prepare import Bootstrapper, free_ports

Bad = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """What a look found: who is bad, and whose GPUs others use; when it was over."""

    bad: Bad = ()
    in_use: Bad = ()
    over_at: datetime


Made = Mapping[str, Bootstrapped]

_GANG_S = 90.0
_SLACK_S = 60.0  # beyond what the node's own limit says: Python starts, workers are ended
# torch reads these when it sets up the ways between nodes: the job's own wishes about them hold for the check too.
_PASSED_ON = ("NCCL_", "GLOO_", "FI_", "TORCH_NCCL_")


@dataclass(slots=True)
class Inspector:
    """Looks at nodes beside everything else; knows which of them passed together before."""

    services: Services
    bootstrapper: Bootstrapper
    pool: ThreadPoolExecutor
    device: str = "cuda"
    _asked: Inspect | None = None
    _work: Future[_Look] | None = None
    _passed: frozenset[str] = field(default_factory=frozenset)
    _in_use: dict[str, datetime] = field(default_factory=dict)
    """Since when others use the GPUs of which node."""

    def start(self, asked: Inspect, snapshot: Snapshot) -> None:
        """Begin to look; an earlier look that still goes on is forgotten.

        What the nodes' bootstraps gave is taken now: one that is forgotten meanwhile has none to ask for.
        """
        self._asked = asked
        made = {node_id: self.bootstrapper.made_of(node_id) for node_id in asked.node_ids}
        self._work = self.pool.submit(self._timed, asked, made, snapshot.state.gpu, self._efa(snapshot))

    def snapshot(self) -> Inspection | None:
        """Return the last look. A fault of ours in it is raised here."""
        if self._asked is None or self._work is None:
            return None
        number, node_ids = self._asked.number, self._asked.node_ids
        if not self._work.done():
            return Inspection(number=number, node_ids=node_ids, done=False)
        look = self._work.result()
        began = min(self._in_use.values(), default=look.over_at)  # of the wait: in turn, they would be used for ever
        since = {node_id: began for node_id, _ in look.in_use}
        self._in_use = since
        in_use = tuple(InUse(node_id=node_id, why=why, since=since[node_id]) for node_id, why in look.in_use)
        return Inspection(
            number=number, node_ids=node_ids, done=True, bad=look.bad, in_use=in_use, over_at=look.over_at
        )

    @property
    def busy(self) -> bool:
        """Whether a look goes on."""
        return self._work is not None and not self._work.done()

    def _efa(self, snapshot: Snapshot) -> bool:
        return any(layout.interfaces for layout in snapshot.state.efa)

    def _timed(self, asked: Inspect, made: Made, gpu: str | None, efa: bool) -> _Look:  # noqa: FBT001
        bad, in_use = self._look(asked, made, gpu, efa)
        return _Look(bad=bad, in_use=in_use, over_at=self.services.clock.now())

    def _look(self, asked: Inspect, made: Made, gpu: str | None, efa: bool) -> tuple[Bad, Bad]:  # noqa: FBT001
        wanted = gate_wanted(self.services.job, gpu)
        if wanted is None:
            return (), ()
        # Threads of their own: this pool's may all be preparing nodes.
        with ThreadPoolExecutor(max_workers=min(32, len(asked.node_ids))) as hands:
            told = list(hands.map(lambda node_id: self._alone(node_id, made[node_id], wanted), asked.node_ids))
            found = [(node_id, why(said), is_in_use(said)) for node_id, said in zip(asked.node_ids, told, strict=True)]
            bad = tuple((node_id, said) for node_id, said, used in found if said and not used)
            in_use = tuple((node_id, said) for node_id, said, used in found if used)
            if bad or in_use or len(asked.node_ids) == 1 or not wanted.full or not wanted.torch:
                return bad, in_use
            if frozenset(asked.node_ids) <= self._passed:
                return (), ()
            bad = self._together(asked.node_ids, made, hands, efa=efa)
        if not bad:
            self._passed = frozenset(asked.node_ids)
        return bad, ()

    def _alone(self, node_id: str, made: Bootstrapped, wanted: GateWanted) -> tuple[Finding, ...]:
        """Return what is found of the node's GPUs now; nothing where it does not answer: that is seen elsewhere."""
        node = self.bootstrapper.node(node_id)
        machine = machine_wanted(self.services.job)
        order = GateOrder(
            wanted=replace(wanted, full=False),
            digest="",
            python=made.python,
            devices=node.devices,
            sudo=machine is not None and machine.install,
        )
        command = gate_command(made.base_python, made.package_path, order)
        try:
            done = self.services.shell.host(node).run(command.argv, stdin=command.stdin, timeout_s=command.timeout_s)
        except NodeError:
            return ()
        checked = parse_checked(done.stdout)
        return checked.findings if checked is not None else ()

    def _together(self, node_ids: tuple[str, ...], made: Made, hands: ThreadPoolExecutor, *, efa: bool) -> Bad:
        drawn = candidates(self.services.name, node_ids)
        try:
            free = hands.map(
                lambda one: free_ports(self.services.shell, self.bootstrapper.node(one), made[one].python, drawn),
                node_ids,
            )
            port = common_port(tuple(free))
        except NodeError:
            return ()
        if port is None:
            return ()
        orders = [self._order(rank, node_ids, made, port) for rank in range(len(node_ids))]
        asked = hands.map(self._ask, node_ids, (made[node_id] for node_id in node_ids), orders)
        snapshot = [one for one in asked if one is not None]
        if len(snapshot) < len(node_ids):
            return ()  # a node that does not answer is seen elsewhere, and without it the others tell nothing
        proven = frozenset(rank for rank, node_id in enumerate(node_ids) if node_id in self._passed)
        found = blame(snapshot, node_ids, efa=efa, proven=proven)
        return tuple((node_ids[one.rank], one.why) for one in found)

    def _order(self, rank: int, node_ids: tuple[str, ...], made: Made, port: int) -> GangOrder:
        node = self.bootstrapper.node(node_ids[rank])
        env = tuple(pair for pair in self.services.job.env if pair[0].startswith(_PASSED_ON))
        return GangOrder(
            rank=rank,
            world=len(node_ids),
            address=self.bootstrapper.node(node_ids[0]).private_address,
            port=port,
            python=made[node_ids[rank]].python,
            device=self.device,
            interface=node.interface,
            own_address=node.private_address,
            devices=node.devices,
            env=env,
            limit_s=_GANG_S,
        )

    def _ask(self, node_id: str, made: Bootstrapped, order: GangOrder) -> GangFacts | None:
        node = self.bootstrapper.node(node_id)
        argv = (made.base_python, made.package_path, "gang")
        try:
            host = self.services.shell.host(node)
            done = host.run(argv, stdin=to_json(order).encode(), timeout_s=order.limit_s + _SLACK_S)
            return from_json(GangFacts, (done.stdout.strip().splitlines() or [b""])[-1])
        except (NodeError, Malformed):
            return None
