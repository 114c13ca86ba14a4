"""The first boot of an AWS machine, run as user data on a machine of the emulated EC2."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import pytest

from gpucloud.adapters.aws.machine import HostKeys, user_data
from gpucloud.adapters.keys import generate_key
from gpucloud.adapters.ssh.shell import SshShell
from gpucloud.domain.job.spec import Market
from gpucloud.domain.node.node import Node, NodeState
from gpucloud.domain.offer import Pool
from gpucloud.store.s3 import S3Store
from gpucloud.system import processes
from tests.lab.aws import Lab
from tests.lab.aws.machines import Machines, Role
from tests.running import words_of
from tests.standins.bare_aws import bare_aws, instance_role

ID = "i-0123456789abcdef0"
STORE = "s3://gpucloud-123456789012-us-east-1/team"
USER_DATA = user_data(store_url=STORE, cluster="gpucloud-digits", region="us-east-1")


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with bare_aws() as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        boto3.client("s3").create_bucket(Bucket="gpucloud-123456789012-us-east-1")
        yield url


@pytest.fixture
def machines(tmp_path: Path, endpoint: str) -> Iterator[Machines]:
    machines = Machines(tmp_path / "machines", endpoint_url=endpoint, region="us-east-1")
    yield machines
    machines.close()


@pytest.fixture
def role(endpoint: str) -> Role:
    return instance_role(endpoint, ID)


def launch(machines: Machines, tmp_path: Path, role: Role | None, **env: str) -> None:
    machines.launch(
        ID,
        instance_type="g4dn.xlarge",
        zone="us-east-1a",
        spot=True,
        image_user="ubuntu",
        public_key=generate_key(tmp_path / "key"),
        user_data=USER_DATA,
        role=role,
        extra_env=env,
    )


def until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


def test_a_machine_publishes_its_host_key_under_its_role_s_name(machines: Machines, role: Role, tmp_path: Path) -> None:
    launch(machines, tmp_path, role)
    until(lambda: machines.user_data_exit(ID) is not None)
    store = S3Store(STORE)
    assert machines.console(ID).startswith(
        f"gpucloud: the host key is published as team/clusters/gpucloud-digits/hosts/{role.role_id}:{ID}\n"
    )
    assert HostKeys(store, "gpucloud-digits", role_id=role.role_id).of(ID) == machines.host_key(ID)
    assert HostKeys(store, "gpucloud-digits", role_id="AROAOTHER").of(ID) is None
    store.close()


def test_a_machine_that_cannot_publish_is_known_by_its_console(machines: Machines, tmp_path: Path) -> None:
    launch(machines, tmp_path, None, GPUCLOUD_PUBLISH_S="0.5")
    until(lambda: machines.user_data_exit(ID) == 1)
    store = S3Store(STORE)
    keys = HostKeys(store, "gpucloud-digits", role_id="AROAOURS", console=machines.console, console_after_s=0)
    assert machines.console(ID).startswith(
        "gpucloud: the host key is not published: the metadata service answered 404\n"
    )
    assert keys.of(ID) == machines.host_key(ID)
    store.close()


def test_the_role_s_keys_are_in_no_log_and_no_command_line(machines: Machines, role: Role, tmp_path: Path) -> None:
    launch(machines, tmp_path, role)
    until(lambda: machines.user_data_exit(ID) is not None)
    logs = "".join(path.read_text() for path in (tmp_path / "machines" / ID).glob("*.log"))
    shown = [" ".join(words_of(pid)) for pid in processes.marked("GPUCLOUD_NODE", ID)]
    for secret in (role.access_key, role.secret_key, role.token):
        assert secret not in logs
        assert not [line for line in shown if secret in line]


def test_a_machine_without_an_agent_powers_itself_off(machines: Machines, role: Role, tmp_path: Path) -> None:
    launch(machines, tmp_path, role, GPUCLOUD_DEAD_MAN_S="0.5", GPUCLOUD_END_S="0")
    until(lambda: machines.powered_off() == {ID})


def test_a_machine_with_an_agent_stays(machines: Machines, role: Role, tmp_path: Path) -> None:
    launch(machines, tmp_path, role, GPUCLOUD_DEAD_MAN_S="2")
    mark = tmp_path / "machines" / ID / "home" / ".gpucloud" / "agent" / "agent.json"
    mark.parent.mkdir(parents=True)
    mark.write_text("{}")
    mark.with_name("visited").touch()
    until(lambda: machines.user_data_exit(ID) == 0 and not _watchers())
    assert machines.powered_off() == frozenset()


def _watchers() -> list[int]:
    return [pid for pid in processes.marked("GPUCLOUD_NODE", ID) if "gpucloud-digits" in " ".join(words_of(pid))]


def test_an_instance_of_the_emulated_ec2_is_reached_with_the_key_that_it_published_in_spite_of_a_slow_s3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(Lab(tmp_path / "lab", machines=_machines))
        for name, value in lab.settings.items():
            monkeypatch.setenv(name, value)
        role_id = _prepare(lab, generate_key(tmp_path / "key"))
        lab.faults.add(action="PutObject", code="SlowDown", status=503, times=2)
        instance = _run_instance(lab)
        store = stack.enter_context(contextlib.closing(S3Store(STORE)))
        keys = HostKeys(store, "gpucloud-digits", role_id=role_id)
        until(lambda: keys.of(instance) is not None)
        published = "gpucloud: the host key is published as team/clusters/gpucloud-digits/hosts/"
        ec2 = lab.client("ec2")  # what is on the disk of the console comes a moment after the key
        until(lambda: published in ec2.get_console_output(InstanceId=instance).get("Output", ""))
        shell = stack.enter_context(contextlib.closing(SshShell(tmp_path / "key")))
        said = shell.host(_node(lab, instance, keys.of(instance))).run(("sh", "-c", "echo $USER"))
    assert said.stdout == b"ubuntu\n"


def _machines(folder: Path, url: str) -> Machines:
    return Machines(folder, endpoint_url=url, region="us-east-1")


def _prepare(lab: Lab, public_key: str) -> str:
    lab.client("s3").create_bucket(Bucket="gpucloud-123456789012-us-east-1")
    lab.client("ec2").import_key_pair(KeyName="gpucloud-digits", PublicKeyMaterial=public_key.encode())
    iam = lab.client("iam")
    role = iam.create_role(RoleName="gpucloud-digits", AssumeRolePolicyDocument="{}")["Role"]
    iam.create_instance_profile(InstanceProfileName="gpucloud-digits")
    iam.add_role_to_instance_profile(InstanceProfileName="gpucloud-digits", RoleName="gpucloud-digits")
    return str(role["RoleId"])


def _run_instance(lab: Lab) -> str:
    made = lab.client("ec2").run_instances(
        ImageId="ami-12c6146b",
        InstanceType="g4dn.xlarge",
        MinCount=1,
        MaxCount=1,
        KeyName="gpucloud-digits",
        IamInstanceProfile={"Name": "gpucloud-digits"},
        UserData=USER_DATA,
    )
    return str(made["Instances"][0]["InstanceId"])


def _node(lab: Lab, instance: str, host_key: str | None) -> Node:
    listed = lab.client("ec2").describe_instances(InstanceIds=[instance])["Reservations"][0]["Instances"][0]
    return Node(
        id=instance,
        pool=Pool(instance_type="g4dn.xlarge", zone="us-east-1a", market=Market.ON_DEMAND),
        state=NodeState.RUNNING,
        launched_at=listed["LaunchTime"],
        address=listed["PublicIpAddress"],
        port=int(lab.settings["GPUCLOUD_SSH_PORT"]),
        user="ubuntu",
        private_address=listed["PrivateIpAddress"],
        interface=None,
        host_key=host_key,
    )
