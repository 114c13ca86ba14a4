"""Bucket, base and cluster on an emulated AWS, by the real Terraform: made once, found again, removed whole."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpucloud.adapters.terraform import find_terraform
from gpucloud.domain.errors import CredentialsError, ProvisionError
from gpucloud.domain.job import AwsChoices
from tests.awsrig import REGION, SPEC, STORE, provisioner
from tests.lab.aws import Lab

# Connections of clients that nobody closes: boto3 leaves that to the end of the process.
pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")]

INSTALL = "install Terraform 1.10 or newer: https://developer.hashicorp.com/terraform/install"
GROUP = "us-east-1/gpucloud-digits"
CALLER = """
import sys
from pathlib import Path
from tests.awsrig import SPEC, provisioner
try:
    provisioner(Path(sys.argv[1])).ensure(SPEC, story=lambda line: print(line, flush=True))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    assert find_terraform() is not None, INSTALL
    with Lab(tmp_path / "lab") as lab:
        for name, value in lab.settings.items():
            monkeypatch.setenv(name, value)
        yield lab


def quiet(line: str) -> None:
    """A story that nobody listens to."""


def ids(lab: Lab) -> dict[str, list[str]]:
    """What stands, by kind, each by the id that AWS gave it; the default network is left out."""
    ec2, mine = lab.client("ec2"), [{"Name": "tag:gpucloud:managed", "Values": ["true"]}]
    groups = lab.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
    iam = lab.client("iam")
    found = {
        "vpc": [one["VpcId"] for one in ec2.describe_vpcs(Filters=mine)["Vpcs"]],
        "subnet": [one["SubnetId"] for one in ec2.describe_subnets(Filters=mine)["Subnets"]],
        "gateway": [
            one["InternetGatewayId"] for one in ec2.describe_internet_gateways(Filters=mine)["InternetGateways"]
        ],
        "table": [one["RouteTableId"] for one in ec2.describe_route_tables(Filters=mine)["RouteTables"]],
        "endpoint": [
            one["VpcEndpointId"]
            for one in ec2.describe_vpc_endpoints(Filters=mine)["VpcEndpoints"]
            if one["State"] != "deleted"
        ],
        "firewall": [one["GroupId"] for one in ec2.describe_security_groups(Filters=mine)["SecurityGroups"]],
        "template": [one["LaunchTemplateId"] for one in ec2.describe_launch_templates(Filters=mine)["LaunchTemplates"]],
        "key": [one["KeyName"] for one in ec2.describe_key_pairs(Filters=mine)["KeyPairs"]],
        "group": [one["AutoScalingGroupARN"] for one in groups],
        "role": [one["RoleId"] for one in iam.list_roles()["Roles"] if one["RoleName"].startswith("gpucloud-")],
        "profile": [one["InstanceProfileId"] for one in iam.list_instance_profiles()["InstanceProfiles"]],
    }
    return {kind: sorted(found[kind]) for kind in found}


def counts(standing: dict[str, list[str]]) -> dict[str, int]:
    return {kind: len(standing[kind]) for kind in standing if standing[kind]}


def instances(lab: Lab) -> list[str]:
    reservations = lab.client("ec2").describe_instances()["Reservations"]
    return [one["InstanceId"] for reservation in reservations for one in reservation["Instances"]]


def actions(lab: Lab, since: int) -> list[str]:
    return [call.action for call in lab.calls[since:]]


def state_key(stack: str) -> str:
    return f"terraform/{stack}/terraform.tfstate"


def lose(lab: Lab, stack: str) -> None:
    """Remove every version of a stack's state."""
    s3, bucket = lab.client("s3"), STORE.removeprefix("s3://")
    for version in s3.list_object_versions(Bucket=bucket, Prefix=state_key(stack))["Versions"]:
        s3.delete_object(Bucket=bucket, Key=version["Key"], VersionId=version["VersionId"])


def spoil(lab: Lab, stack: str, change: Callable[[bytes], bytes]) -> None:
    s3, where = lab.client("s3"), {"Bucket": STORE.removeprefix("s3://"), "Key": state_key(stack)}
    s3.put_object(**where, Body=change(s3.get_object(**where)["Body"].read()))


WHOLE = {
    "vpc": 1,
    "subnet": 6,
    "gateway": 1,
    "table": 1,
    "endpoint": 1,
    "firewall": 3,
    "template": 1,
    "key": 1,
    "group": 1,
    "role": 2,
    "profile": 1,
}
BASE = {"vpc": 1, "subnet": 6, "gateway": 1, "table": 1, "endpoint": 1, "firewall": 2, "role": 1}


def test_a_cluster_is_made_once_moved_on_and_removed_and_the_base_outlives_it(lab: Lab, tmp_path: Path) -> None:
    aws = provisioner(tmp_path / "home")
    assert aws.base(REGION) is None
    assert aws.ensure(SPEC, story=quiet) == GROUP
    assert counts(ids(lab)) == WHOLE
    assert instances(lab) == []
    (template,) = lab.client("ec2").describe_launch_template_versions(
        LaunchTemplateName="gpucloud-digits-efa0", Versions=["$Latest"]
    )["LaunchTemplateVersions"]
    disks = template["LaunchTemplateData"]["BlockDeviceMappings"]
    assert [(disk["DeviceName"], disk["Ebs"]["Encrypted"]) for disk in disks] == [("/dev/xvda", True)]

    before = len(lab.calls)
    assert aws.ensure(SPEC, story=quiet) == GROUP
    again = actions(lab, before)
    assert len([action for action in again if action == "GetObject"]) == 2, again  # one small read a stack
    assert not [action for action in again if action.startswith(("Create", "Put", "Modify", "Update"))], again

    other = dataclasses.replace(SPEC, node_type="g5.xlarge", tags=(("gpucloud:job", "digits"), ("project", "speech")))
    aws.ensure(other, story=quiet)
    group = lab.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"][0]
    assert {"project": "speech"}.items() <= {tag["Key"]: tag["Value"] for tag in group["Tags"]}.items()

    with pytest.raises(ProvisionError, match="the base in us-east-1 is in use by gpucloud-digits") as caught:
        aws.destroy_base(REGION, story=quiet)
    assert caught.value.hint == "first `gpucloud down digits`"
    aws.destroy(GROUP, story=quiet)
    aws.destroy(GROUP, story=quiet)
    assert counts(ids(lab)) == BASE
    costs = aws.base(REGION)
    assert costs is not None
    assert costs.monthly_usd == 0
    aws.destroy_base(REGION, story=quiet)
    aws.destroy_base(REGION, story=quiet)
    assert counts(ids(lab)) == {}


def test_lost_states_are_rebuilt_from_what_stands_and_nothing_is_made_twice(lab: Lab, tmp_path: Path) -> None:
    provisioner(tmp_path / "home").ensure(SPEC, story=quiet)
    before = ids(lab)
    for stack in ("base-us-east-1", "gpucloud-digits-us-east-1"):
        lose(lab, stack)
    told: list[str] = []
    aws = provisioner(tmp_path / "other-machine")
    aws.ensure(SPEC, story=told.append)
    assert ids(lab) == before, told
    lose(lab, "gpucloud-digits-us-east-1")
    aws.destroy(GROUP, story=quiet)
    lose(lab, "base-us-east-1")
    aws.destroy_base(REGION, story=quiet)
    assert counts(ids(lab)) == {}


def test_a_damaged_state_gives_way_to_its_last_whole_version(lab: Lab, tmp_path: Path) -> None:
    aws = provisioner(tmp_path / "home")
    aws.ensure(SPEC, story=quiet)
    before = ids(lab)
    spoil(lab, "base-us-east-1", lambda data: data[: len(data) // 2])
    vpc = before["vpc"][0].encode()
    spoil(lab, "gpucloud-digits-us-east-1", lambda data: data.replace(vpc[-4:], vpc[-4:][::-1]) + b" ")
    told: list[str] = []
    aws.ensure(SPEC, story=told.append)
    assert ids(lab) == before
    assert told.count("its last whole version is back in place") == 2
    kept = lab.client("s3").list_objects_v2(Bucket=STORE.removeprefix("s3://"), Prefix="terraform/")["Contents"]
    assert len([one for one in kept if ".damaged-" in one["Key"]]) == 2


def test_a_cluster_of_which_no_record_is_left_is_still_removed(lab: Lab, tmp_path: Path) -> None:
    provisioner(tmp_path / "home").ensure(SPEC, story=quiet)
    s3, bucket = lab.client("s3"), STORE.removeprefix("s3://")
    for version in s3.list_object_versions(Bucket=bucket, Prefix="terraform/gpucloud-")["Versions"]:
        s3.delete_object(Bucket=bucket, Key=version["Key"], VersionId=version["VersionId"])
    provisioner(tmp_path / "other-machine").destroy(GROUP, story=quiet)
    assert counts(ids(lab)) == BASE


def test_the_users_own_subnets_are_used_and_no_network_is_made(lab: Lab, tmp_path: Path) -> None:
    ec2 = lab.client("ec2")
    subnets = {one["AvailabilityZone"]: one["SubnetId"] for one in ec2.describe_subnets()["Subnets"]}
    own = (subnets["us-east-1a"], subnets["us-east-1b"])
    aws = provisioner(tmp_path / "home", AwsChoices(subnets=own))
    aws.ensure(SPEC, story=quiet)
    assert "vpc" not in counts(ids(lab))
    group = lab.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"][0]
    assert sorted(group["VPCZoneIdentifier"].split(",")) == sorted(own)
    aws.destroy(GROUP, story=quiet)
    assert counts(ids(lab)) == {}


def test_expired_credentials_are_told_as_such(lab: Lab, tmp_path: Path) -> None:
    lab.faults.expired_from = time.time()
    with pytest.raises(CredentialsError):
        provisioner(tmp_path / "home").ensure(SPEC, story=quiet)


def test_a_refusal_is_one_line_with_the_next_step(lab: Lab, tmp_path: Path) -> None:
    lab.faults.add("CreateVpc", code="VpcLimitExceeded", status=400)
    with pytest.raises(ProvisionError, match=r"VpcLimitExceeded") as caught:
        provisioner(tmp_path / "home").ensure(SPEC, story=quiet)
    assert "StatusCode" not in caught.value.message
    assert caught.value.exit_code == 13


def test_no_key_reaches_a_file(lab: Lab, tmp_path: Path) -> None:
    lab.faults.add("CreateVpc", code="VpcLimitExceeded", status=400)
    home = tmp_path / "home"
    with pytest.raises(ProvisionError):
        provisioner(home).ensure(SPEC, story=quiet)
    files = [path for path in home.rglob("*") if path.is_file() and "providers" not in path.parts]
    assert files
    secret = os.environ["AWS_SECRET_ACCESS_KEY"].encode()
    assert [path for path in files if secret in path.read_bytes()] == []


def interrupted(lab: Lab, home: Path, at_call: int, number: signal.Signals) -> int:
    """Run `ensure` in another process and send it the signal at the n-th call; return its exit code."""
    before = len(lab.calls)
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER, str(home)],
        cwd=Path(__file__).parents[2],
        env=lab.env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while len(lab.calls) - before < at_call and caller.poll() is None:
        time.sleep(0.005)
    if number is signal.SIGKILL:
        everything_of(home)  # Terraform too: a machine that lost its power
    if caller.poll() is None:
        caller.send_signal(number)
    return caller.wait(timeout=120)


def everything_of(home: Path) -> None:
    """SIGKILL every process that works in this home: Terraform, its providers and its keeper."""
    mark = str(home).encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if str((entry / "cwd").readlink()).encode().startswith(mark):
                    os.kill(int(entry.name), signal.SIGKILL)
            except OSError:
                continue


def converges(lab: Lab, home: Path, at_call: int, number: signal.Signals) -> None:
    code = interrupted(lab, home, at_call, number)
    assert instances(lab) == []
    assert code in {0, 130, -signal.SIGKILL}
    told: list[str] = []
    assert provisioner(home).ensure(SPEC, story=told.append) == GROUP
    assert counts(ids(lab)) == WHOLE, told
    assert instances(lab) == []


@pytest.mark.parametrize(
    ("at_call", "number"), [(40, signal.SIGKILL), (90, signal.SIGINT), (185, signal.SIGKILL)], ids=str
)
def test_a_run_that_was_ended_anywhere_is_finished_by_the_next_one(
    lab: Lab, tmp_path: Path, at_call: int, number: signal.Signals
) -> None:
    converges(lab, tmp_path / "home", at_call, number)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=str)
@pytest.mark.parametrize("at_call", range(15, 230, 18))
def test_a_run_that_was_ended_at_any_of_many_points_is_finished_by_the_next_one(
    lab: Lab, tmp_path: Path, at_call: int, number: signal.Signals
) -> None:
    converges(lab, tmp_path / "home", at_call, number)
