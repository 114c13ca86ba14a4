"""The emulated EC2's machines: what a real one does over SSH, over its metadata service and at its end."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from gpucloud.adapters.keys import generate_key
from gpucloud.adapters.packaging import package_zip
from gpucloud.adapters.ssh.shell import SshShell
from gpucloud.domain.errors import HostUnreachable
from gpucloud.domain.job.spec import Market
from gpucloud.domain.node.bootstrap.facts import ship
from gpucloud.domain.node.node import Node, NodeState
from gpucloud.domain.node.status import Desired, Launch, Stop, desired_to_json
from gpucloud.domain.offer import Pool
from gpucloud.system import processes
from tests.lab.aws.machines import Address, Machines, Role
from tests.standins.bare_aws import bare_aws, instance_role

ID = "i-0123456789abcdef1"  # no other file's: what runs on a machine of that name is found, and ended, by it


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    machines = Machines(tmp_path / "machines", endpoint_url="http://127.0.0.1:9", region="us-east-1")
    yield machines
    machines.close()


def start(machines: Machines, keys: Path, *, id_: str = ID, user_data: str = "", role: Role | None = None) -> Address:
    public = generate_key(keys) if not keys.exists() else keys.with_suffix(".pub").read_text()
    keys.with_suffix(".pub").write_text(public)
    return machines.launch(
        id_,
        instance_type="g4dn.xlarge",
        zone="us-east-1a",
        spot=True,
        image_user="ubuntu",
        public_key=public,
        user_data=user_data,
        role=role,
        account="123456789012",
    )


def node(machines: Machines, address: Address, id_: str = ID) -> Node:
    return Node(
        id=id_,
        pool=Pool(instance_type="g4dn.xlarge", zone="us-east-1a", market=Market.SPOT),
        state=NodeState.RUNNING,
        launched_at=datetime(2026, 1, 1, tzinfo=timezone.utc),
        address=address.address,
        port=address.port,
        user="ubuntu",
        private_address=address.address,
        interface=None,
        host_key=machines.host_key(id_),
    )


def until(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


def metadata(endpoint: str, path: str, *, token: bool = True) -> tuple[int, str]:
    connection = http.client.HTTPConnection(endpoint.removeprefix("http://"), timeout=5)
    headers = {}
    if token:
        connection.request("PUT", "/latest/api/token", headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"})
        headers["X-aws-ec2-metadata-token"] = connection.getresponse().read().decode()
    connection.request("GET", path, headers=headers)
    reply = connection.getresponse()
    body = reply.read().decode()
    connection.close()
    return reply.status, body


def test_each_machine_has_its_own_address_and_all_have_one_port(machines: Machines, tmp_path: Path) -> None:
    first = start(machines, tmp_path / "key", id_="i-0a")
    second = start(machines, tmp_path / "key", id_="i-0b")
    assert (first.address, second.address) == ("127.1.0.10", "127.1.0.11")
    assert first.port == second.port == machines.port
    assert machines.host_key("i-0a") != machines.host_key("i-0b")


def test_the_image_s_user_gets_in_with_the_pinned_host_key(machines: Machines, tmp_path: Path) -> None:
    address = start(machines, tmp_path / "key")
    shell = SshShell(tmp_path / "key")
    try:
        said = shell.host(node(machines, address)).run(("sh", "-c", "echo $USER; env"))
    finally:
        shell.close()
    lines = said.stdout.decode().splitlines()
    assert lines[0] == "ubuntu"
    assert "AWS_ENDPOINT_URL=http://127.0.0.1:9" in lines
    assert "AWS_REGION=us-east-1" in lines
    assert not [line for line in lines if line.startswith(("AWS_ACCESS_KEY_ID", "AWS_SECRET", "AWS_SESSION"))]
    until(lambda: machines.answers(ID))


def test_boto3_on_the_machine_is_the_role(tmp_path: Path) -> None:
    script = "import boto3; print(boto3.client('sts', 'us-east-1').get_caller_identity()['UserId'])"
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(bare_aws())
        role = instance_role(url, ID)
        machines = stack.enter_context(
            contextlib.closing(Machines(tmp_path / "machines", endpoint_url=url, region="us-east-1"))
        )
        address = start(machines, tmp_path / "key", role=role)
        shell = stack.enter_context(contextlib.closing(SshShell(tmp_path / "key")))
        said = shell.host(node(machines, address)).run(("python3", "-c", script))
    assert said.stdout.decode().strip() == f"{role.role_id}:{ID}", said.stderr.decode()


def test_metadata_needs_a_token_and_tells_the_role_and_the_account(machines: Machines, tmp_path: Path) -> None:
    role = Role(name="r", role_id="AROA1", arn="arn", access_key="ASIAX", secret_key="s", token="t")
    start(machines, tmp_path / "key", role=role)
    endpoint = machines.metadata_url(ID)
    told = {
        path: metadata(endpoint, f"/latest/meta-data/{path}")[1]
        for path in ("instance-id", "instance-type", "placement/availability-zone", "placement/region", "local-ipv4")
    }
    assert told == {
        "instance-id": ID,
        "instance-type": "g4dn.xlarge",
        "placement/availability-zone": "us-east-1a",
        "placement/region": "us-east-1",
        "local-ipv4": "127.1.0.10",
    }
    assert metadata(endpoint, "/latest/meta-data/instance-id", token=False)[0] == 401
    assert metadata(endpoint, "/latest/meta-data/iam/security-credentials/") == (200, "r")
    keys = json.loads(metadata(endpoint, "/latest/meta-data/iam/security-credentials/r")[1])
    assert (keys["Code"], keys["AccessKeyId"], keys["Token"]) == ("Success", "ASIAX", "t")
    info = json.loads(metadata(endpoint, "/latest/meta-data/iam/info")[1])
    assert info["InstanceProfileArn"] == "arn:aws:iam::123456789012:instance-profile/r"
    identity = json.loads(metadata(endpoint, "/latest/dynamic/instance-identity/document")[1])
    assert identity["accountId"] == "123456789012"


def test_a_notice_and_a_rebalance_hint_are_there_once_they_were_given(machines: Machines, tmp_path: Path) -> None:
    start(machines, tmp_path / "key")
    endpoint = machines.metadata_url(ID)
    action, hint = "/latest/meta-data/spot/instance-action", "/latest/meta-data/events/recommendations/rebalance"
    assert metadata(endpoint, action)[0] == 404
    assert metadata(endpoint, hint)[0] == 404
    machines.recommend_rebalance(ID)
    assert metadata(endpoint, hint)[0] == 200
    machines.notice(ID, datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc))
    assert json.loads(metadata(endpoint, action)[1]) == {"action": "terminate", "time": "2026-01-02T03:04:05Z"}


def test_user_data_runs_and_the_console_shows_it_before_the_host_keys(machines: Machines, tmp_path: Path) -> None:
    start(machines, tmp_path / "key", user_data="#!/bin/sh\necho from user data\n")
    until(lambda: machines.user_data_exit(ID) == 0)
    said = machines.console(ID)
    block = f"-----BEGIN SSH HOST KEY KEYS-----\n{machines.host_key(ID)} root@{ID}\n-----END SSH HOST KEY KEYS-----\n"
    assert said.startswith("from user data\n")
    assert block in said


@pytest.mark.parametrize("command", ["sudo shutdown -h now", "sudo -n poweroff"])
def test_a_machine_that_shuts_down_is_off_with_all_that_ran_on_it(
    machines: Machines, tmp_path: Path, command: str
) -> None:
    left = "setsid sleep 1000 </dev/null >/dev/null 2>&1 &\n"
    start(machines, tmp_path / "key", user_data=f"#!/bin/sh\n{left}{command}\n")
    until(lambda: machines.powered_off() == {ID})
    assert processes.marked("GPUCLOUD_NODE", ID) == ()
    assert not machines.answers(ID)


def test_a_shutdown_in_minutes_can_be_called_off(machines: Machines, tmp_path: Path) -> None:
    start(machines, tmp_path / "key", user_data="#!/bin/sh\nshutdown -h +30 && shutdown -c\n")
    until(lambda: machines.user_data_exit(ID) == 0)
    assert machines.powered_off() == frozenset()


def test_the_end_takes_every_process(machines: Machines, tmp_path: Path) -> None:
    address = start(machines, tmp_path / "key")
    shell = SshShell(tmp_path / "key", connect_timeout_s=2.0)
    host = shell.host(node(machines, address))
    host.run(("sh", "-c", "env -i setsid sleep 1000 </dev/null >/dev/null 2>&1 & echo"))
    machines.end(ID)
    assert processes.marked("GPUCLOUD_NODE", ID) == ()
    assert os.listdir(tmp_path / "machines" / ID).count("home") == 0
    with pytest.raises(HostUnreachable):
        host.run(("true",))
    shell.close()
    machines.end(ID)


def test_a_frozen_machine_is_there_and_silent(machines: Machines, tmp_path: Path) -> None:
    start(machines, tmp_path / "key")
    until(lambda: machines.answers(ID))
    machines.freeze(ID)
    assert not machines.answers(ID)
    assert machines.alive() == {ID}
    assert machines.powered_off() == frozenset()


def test_an_agent_on_a_machine_hears_the_notice_finds_its_interface_and_ends_the_machine_when_unpaid(
    machines: Machines, tmp_path: Path
) -> None:
    address = start(machines, tmp_path / "key")
    data, sha256 = package_zip()
    launch = Launch(
        attempt=1,
        argv=("/bin/sh", "-c", "echo $GLOO_SOCKET_IFNAME; exec sleep 600"),
        directory="/",
        env=(),
        address=address.address,
    )
    until_ = datetime.now(timezone.utc) + timedelta(seconds=3)
    desired = desired_to_json(Desired(epoch=1, launch=launch, stop=Stop.NO, paid_until=until_))
    shell = SshShell(tmp_path / "key")
    host = shell.host(node(machines, address))
    host.run(ship("python3", sha256, ".gpucloud"), stdin=data)
    end = ("--power-off-after", "0.5", "--power-off", "sudo", "shutdown", "-h", "now")
    began = host.run(("sh", "-c", f'python3 "$HOME/.gpucloud/lib/gpucloud-{sha256}.zip" agent {" ".join(end)}'))
    assert began.stdout == b"started\n", began.stderr
    write = "cat >.gpucloud/agent/new; mv .gpucloud/agent/new .gpucloud/agent/desired.json"
    host.run(("sh", "-c", write), stdin=desired.encode())
    log = tmp_path / "machines" / ID / "home" / ".gpucloud" / "attempts" / "0001" / "launcher.log"
    until(lambda: log.exists() and log.read_text() == "lo\n")
    machines.notice(ID, until_ + timedelta(seconds=60))
    until((log.parent / "stop.json").exists)
    assert json.loads((log.parent / "stop.json").read_text())["reason"] == "notice"
    until(lambda: machines.powered_off() == {ID})
    assert datetime.now(timezone.utc) >= until_ + timedelta(seconds=0.5)
    shell.close()
