"""A machine of the emulated AWS that makes itself fit from the store, beside one that a supervisor makes fit."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, cast

import boto3
import pytest

from gpucloud.adapters.aws.machine import user_data
from gpucloud.adapters.jobfile import read_job
from gpucloud.adapters.keys import generate_key
from gpucloud.adapters.packaging import package_zip
from gpucloud.adapters.ssh.shell import SshShell
from gpucloud.adapters.transfer.sync import whole_code
from gpucloud.domain.job.spec import Job, Market
from gpucloud.domain.node.bootstrap.facts import Facts, parse_facts, probe, question
from gpucloud.domain.node.bootstrap.wanted import Wanted
from gpucloud.domain.node.node import Node, NodeState
from gpucloud.domain.offer import Pool
from gpucloud.ports import Host
from gpucloud.store.s3 import S3Store
from gpucloud.system import processes
from gpucloud.system.retries import SystemClock
from gpucloud.usecases.services import Package, SelfBoot, Services
from gpucloud.usecases.supervise.agents import NodeRecords
from gpucloud.usecases.supervise.bootstrap import Bootstrapped, bootstrap
from gpucloud.usecases.supervise.needs import of_node, wanted_for
from tests.lab.aws.machines import Address, Machines
from tests.running import words_of
from tests.standins.bare_aws import bare_aws, instance_role

STORE = "s3://gpucloud-123456789012-us-east-1/team"
CLUSTER = "gpucloud-digits"
USER_DATA = user_data(store_url=STORE, cluster=CLUSTER, region="us-east-1")
GPU = "T4"
POOL = Pool(instance_type="g4dn.xlarge", zone="us-east-1a", market=Market.SPOT)
POWER_OFF = ("sudo", "shutdown", "-h", "now")
FILE = """\
name: digits
cloud: aws
code: src
resources: {nodes: 1, gpus: 1, gpu: [T4]}
setup: cp word.txt "$VIRTUAL_ENV/made.txt" && sleep 0.5
run: sh -c true
budget: 5 USD
gate: quick
machine: {driver: keep}
"""


@dataclass
class Rig:
    """A store with the job's record in it, and machines."""

    folder: Path
    endpoint: str
    store: S3Store
    world: Services
    machines: Machines
    public_key: str
    at: dict[str, Address]

    @property
    def records(self) -> NodeRecords:
        return NodeRecords(services=self.world)

    def publish(self) -> None:
        self.records.publish(self.needs, POOL, GPU, lambda line: None)

    def needs(self, code: str) -> Wanted:
        package, store = self.world.package.sha256, self.store.url
        return wanted_for(
            self.world.job,
            package=package,
            code=code,
            secrets=self.world.secrets,
            store_url=store,
            power_off=POWER_OFF,
        )

    def launch(self, id_: str, **env: str) -> None:
        self.at[id_] = self.machines.launch(
            id_,
            instance_type="g4dn.xlarge",
            zone="us-east-1a",
            spot=True,
            image_user="ubuntu",
            public_key=self.public_key,
            user_data=USER_DATA,
            role=instance_role(self.endpoint, id_, f"{CLUSTER}-{id_}"),
            extra_env=env,
        )

    def node(self, id_: str) -> Node:
        return Node(
            id=id_,
            pool=POOL,
            state=NodeState.RUNNING,
            launched_at=datetime.now(timezone.utc),
            address=self.at[id_].address,
            port=self.at[id_].port,
            user="ubuntu",
            private_address=self.at[id_].address,
            interface=None,
            host_key=self.machines.host_key(id_),
        )

    @contextlib.contextmanager
    def over_ssh(self, id_: str) -> Iterator[Host]:
        until(lambda: self.machines.answers(id_))
        with contextlib.closing(SshShell(self.folder / "key")) as shell:
            yield shell.host(self.node(id_))

    def supervise(self, id_: str, story: Callable[[str], None] = lambda line: None) -> Bootstrapped:
        """Do with a machine what a supervisor does."""
        with self.over_ssh(id_) as host:
            wanted = self.wanted(host.sync(self.world.job.code, ".gpucloud/code"), id_)
            return bootstrap(host, wanted, self.world.package, SystemClock(), story=story)

    def wanted(self, code: str, id_: str) -> Wanted:
        return of_node(self.needs(code), self.world.job, GPU, self.node(id_), self.store.url)

    def facts(self, id_: str) -> Facts:
        with self.over_ssh(id_) as host:
            wanted = self.wanted(host.sync(self.world.job.code, ".gpucloud/code"), id_)
            asked = probe(self.world.package.sha256, ".gpucloud")
            found = parse_facts(host.run(asked, stdin=question(wanted)).stdout)
        assert isinstance(found, Facts)
        return found

    def root(self, id_: str) -> Path:
        return self.folder / "machines" / id_ / "home" / ".gpucloud"

    def ended(self, id_: str) -> dict[str, Any] | None:
        path = self.root(id_) / "boot" / "ended.json"
        return dict(json.loads(path.read_text())) if path.exists() else None

    def made_itself(self, id_: str, limit_s: float = 60.0) -> dict[str, Any]:
        until(lambda: self.ended(id_) is not None, limit_s)
        return self.ended(id_) or {}

    def bootstraps(self, id_: str) -> list[int]:
        """The processes of the machine's own bootstrap."""
        marked = processes.marked("GPUCLOUD_NODE", id_)
        return [pid for pid in marked if "bootstrap" in words_of(pid) and "sudo" not in words_of(pid)]


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with bare_aws() as url:
        for name, value in (
            ("AWS_ENDPOINT_URL", url),
            ("AWS_ACCESS_KEY_ID", "k"),
            ("AWS_SECRET_ACCESS_KEY", "s"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
        ):
            monkeypatch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="gpucloud-123456789012-us-east-1")
        yield url


@pytest.fixture
def rig(tmp_path: Path, endpoint: str) -> Iterator[Rig]:
    (tmp_path / "src" / "deep").mkdir(parents=True)
    (tmp_path / "src" / "word.txt").write_text("exact\n")
    (tmp_path / "src" / "deep" / "link").symlink_to("../word.txt")
    (tmp_path / "job.yaml").write_text(FILE)
    store = S3Store(STORE)
    machines = Machines(tmp_path / "machines", endpoint_url=endpoint, region="us-east-1")
    try:
        yield Rig(
            folder=tmp_path,
            endpoint=endpoint,
            store=store,
            world=_world(read_job(tmp_path / "job.yaml"), store),
            machines=machines,
            public_key=generate_key(tmp_path / "key"),
            at={},
        )
    finally:
        machines.close()
        store.close()


def _world(job: Job, store: S3Store, **secrets: str) -> Services:
    data, sha256 = package_zip()
    unused = cast(Any, None)
    return Services(
        job=job,
        name="digits",
        clock=SystemClock(),
        store=store,
        provisioner=unused,
        group=unused,
        market=unused,
        shell=unused,
        outputs=unused,
        public_key="",
        package=Package(data=data, sha256=sha256),
        rules=unused,
        period_s=1.0,
        secrets=secrets,
        self_boot=SelfBoot(login="ubuntu", pack_code=partial(whole_code, cache=None)),
    )


def until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


def test_a_machine_makes_itself_what_a_supervisor_would_have_made_of_it(rig: Rig) -> None:
    rig.launch("i-by-ssh")
    by_ssh = rig.supervise("i-by-ssh")
    theirs = rig.facts("i-by-ssh")
    layers = rig.folder / "machines" / "layers"
    layers.rename(rig.folder / "machines" / "layers-of-the-first")  # else the second machine would find its layer made
    rig.publish()
    rig.launch("i-itself")
    ended = rig.made_itself("i-itself")
    assert ended["error"] is None
    assert by_ssh.changed == ("package", "machine", "agent", "setup", "gate")
    assert ended["changed"] == ["machine", "agent", "setup", "gate"]  # it runs from the package
    assert _lock(ended["lock"]) == _lock(by_ssh.lock)
    assert ended["findings"] == list(by_ssh.findings)
    assert not (rig.root("i-itself") / "agent" / "visited").exists()
    ours = rig.facts("i-itself")
    assert _comparable(ours) == _comparable(theirs)
    assert ours.layer is not None
    assert Path(ours.layer.python).parents[1].joinpath("made.txt").read_text() == "exact\n"
    again = rig.supervise("i-itself")
    assert (again.changed, again.lock) == ((), ended["lock"])


def _lock(record: dict[str, Any]) -> dict[str, Any]:
    """The lock record without how long the gate took."""
    return {**record, "gate": {name: said for name, said in record["gate"].items() if name != "took"}}


def _comparable(facts: Facts) -> Facts:
    """The facts without what two equal machines differ in: places, times, what is free."""
    assert facts.layer is not None
    assert facts.gate is not None
    never = datetime.min.replace(tzinfo=timezone.utc)
    return replace(facts, root="", time=never, free_bytes=0, gate=replace(facts.gate, at=never, figures=()))


def test_the_record_holds_no_secret_and_stays_the_same_for_the_same_job(rig: Rig) -> None:
    secret = "canary-c2VjcmV0"
    job = replace(rig.world.job, secrets=("TOKEN",), env=(("EPOCHS", "3"),))
    rig.world = replace(rig.world, job=job, secrets={"TOKEN": secret})
    told: list[str] = []
    records = rig.records
    for _ in range(2):
        records.publish(rig.needs, POOL, GPU, told.append)
    written = rig.store.get(f"clusters/{CLUSTER}/node.json")
    assert written is not None
    assert secret.encode() not in written.data
    record = json.loads(written.data)
    assert record["wanted"]["env"] == [["EPOCHS", "3"]]
    assert told == ["machines do not make setup themselves: `setup:` may use TOKEN, and secrets are not in the store"]
    rig.launch("i-1")
    ended = rig.made_itself("i-1")
    assert ended["changed"] == ["machine", "agent"]
    assert ended["left"]["step"] == "setup"
    assert rig.supervise("i-1").changed == ("setup", "gate")


def test_what_stood_in_the_store_for_machines_goes_with_the_cluster(rig: Rig) -> None:
    records = rig.records
    records.publish(rig.needs, POOL, GPU, lambda line: None)
    assert len(rig.store.list(f"clusters/{CLUSTER}/")) == 2
    records.withdraw()
    assert rig.store.list(f"clusters/{CLUSTER}/") == ()


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_killed_at_any_moment_it_ends_the_same(rig: Rig, seed: int) -> None:
    rng = random.Random(seed)
    rig.publish()
    rig.launch("i-1")
    kills = 0
    while kills < 4 and rig.ended("i-1") is None:  # it is run again five times
        until(lambda: bool(rig.bootstraps("i-1")) or rig.ended("i-1") is not None)
        time.sleep(rng.uniform(0.0, 1.5))
        for pid in rig.bootstraps("i-1"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                kills += 1
    ended = rig.made_itself("i-1")
    assert kills >= 1
    assert ended["error"] is None
    again = rig.supervise("i-1")
    assert (again.changed, again.lock) == ((), ended["lock"])


def test_a_supervisor_that_comes_in_the_middle_waits_and_finds_nothing_to_do(rig: Rig) -> None:
    rig.publish()
    rig.launch("i-1")
    until((rig.root("i-1") / "boot" / "lock").exists)
    told: list[str] = []
    by_ssh = rig.supervise("i-1", told.append)
    ended = rig.made_itself("i-1", 0.5)
    assert told == ["i-1 makes itself ready; waiting for it"]
    assert by_ssh.changed == ()
    assert dict(by_ssh.seconds)["own"] > 0.3
    assert by_ssh.lock == ended["lock"]


def test_a_supervisor_goes_on_where_the_machine_s_own_bootstrap_died(rig: Rig) -> None:
    rig.publish()
    rig.launch("i-1")
    until((rig.root("i-1") / "boot" / "lock").exists)
    dead = threading.Event()

    def kill() -> None:
        while not dead.wait(0.05):
            for pid in rig.bootstraps("i-1"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        by_ssh = rig.supervise("i-1")
    finally:
        dead.set()
        killer.join()
    assert rig.ended("i-1") is None
    assert by_ssh.changed[-2:] == ("setup", "gate")


def test_a_torn_package_is_refused(rig: Rig) -> None:
    rig.publish()
    (key,) = (key for key in rig.store.list(f"clusters/{CLUSTER}/") if key.endswith(".zip"))
    rig.store.put(key, rig.world.package.data[:-1000])
    rig.launch("i-1")
    until(lambda: rig.machines.user_data_exit("i-1") == 0)
    assert (
        "gpucloud: not made fit by itself: the package in the store is not the one that the record names"
        in rig.machines.console("i-1")
    )
    assert rig.bootstraps("i-1") == []
    assert not rig.root("i-1").exists()
    assert "package" in rig.supervise("i-1").changed


def test_torn_code_is_refused_and_what_needs_none_of_it_is_left_to_the_supervisor(rig: Rig) -> None:
    rig.publish()
    (key,) = rig.store.list("jobs/digits/control/code/")
    whole = rig.store.get(key)
    assert whole is not None
    rig.store.put(key, whole.data[:-3])
    rig.launch("i-1")
    ended = rig.made_itself("i-1")
    assert ended["error"] == "the code in the store is not whole: the transfer was cut off"
    assert rig.supervise("i-1").changed == ("machine", "agent", "setup", "gate")


def test_without_a_record_nothing_happens(rig: Rig) -> None:
    rig.launch("i-1")
    until(lambda: rig.machines.user_data_exit("i-1") == 0)
    assert "fit" not in rig.machines.console("i-1")
    assert not rig.root("i-1").exists()


def test_a_machine_that_made_itself_fit_and_was_never_visited_powers_itself_off(rig: Rig) -> None:
    rig.publish()
    rig.launch("i-1", GPUCLOUD_DEAD_MAN_S="25", GPUCLOUD_END_S="2")
    assert rig.made_itself("i-1", 24)["error"] is None
    assert (rig.root("i-1") / "agent" / "agent.json").exists()
    until(lambda: rig.machines.powered_off() == {"i-1"}, 30)
