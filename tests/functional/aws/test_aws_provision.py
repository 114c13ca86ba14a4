"""Bucket, base and cluster on an emulated AWS, by the real Terraform: made once, found again, removed whole.

Terraform's provider takes seconds to start: the tests share one, and one AWS. Each first has the cluster stand, which
costs nothing where the test before it left one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpucloud.adapters.aws.nodes.listing import drill_role
from gpucloud.adapters.aws.policy import node_policy
from gpucloud.adapters.aws.provision import AwsProvisioner
from gpucloud.adapters.aws.session import Aws
from gpucloud.adapters.aws.standing import find_cluster, require_session_tools, zone_of_nat
from gpucloud.adapters.aws.statements import Uses
from gpucloud.adapters.terraform import find_terraform
from gpucloud.domain.errors import CredentialsError, ProvisionError, ToolMissing
from gpucloud.domain.job.spec import AwsChoices
from gpucloud.domain.offer import EfaLayout
from tests.awsrig import (
    ALERT,
    BASE,
    GROUP,
    INSTALL,
    REGION,
    SPEC,
    STORE,
    WHOLE,
    actions,
    changing,
    counts,
    ids,
    instances,
    provisioner,
    quiet,
)
from tests.iam.printed import let_as_printed
from tests.lab.aws import Lab
from tests.lab.aws.plugins import standing_provider
from tests.lab.aws.world import SECRET_KEY

# Connections of clients that nobody closes: boto3 leaves that to the end of the process.
pytestmark = [pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")]


@dataclasses.dataclass(frozen=True)
class Standing:
    """The AWS of these tests, and the folder of the machine that made the cluster in it."""

    lab: Lab
    home: Path
    told: list[str] = dataclasses.field(default_factory=list)

    @property
    def aws(self) -> AwsProvisioner:
        """The provisioner of a new process on that machine."""
        return provisioner(self.home, ALERT)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    assert find_terraform() is not None, INSTALL
    folder = tmp_path_factory.mktemp("aws")
    with Lab(folder / "lab") as lab, pytest.MonkeyPatch.context() as patch:
        for name, value in lab.settings.items():
            patch.setenv(name, value)
        let_as_printed(lab, regions=())
        with standing_provider(lab.env) as attached:
            for name, value in attached.items():
                patch.setenv(name, value)
            yield Standing(lab, folder / "home")


@pytest.fixture
def standing(shared: Standing) -> Iterator[Standing]:
    """A cluster, SPEC as it is, on its base."""
    assert shared.aws.ensure(SPEC, story=shared.told.append) == GROUP
    yield shared
    shared.lab.faults.clear()


def lose(lab: Lab, prefix: str) -> None:
    """Remove every version of what the store keeps under `terraform/<prefix>`."""
    s3, bucket = lab.client("s3"), STORE.removeprefix("s3://")
    for version in s3.list_object_versions(Bucket=bucket, Prefix=f"terraform/{prefix}")["Versions"]:
        s3.delete_object(Bucket=bucket, Key=version["Key"], VersionId=version["VersionId"])


def spoil(lab: Lab, stack: str, change: Callable[[bytes], bytes]) -> None:
    s3 = lab.client("s3")
    where = {"Bucket": STORE.removeprefix("s3://"), "Key": f"terraform/{stack}/terraform.tfstate"}
    s3.put_object(**where, Body=change(s3.get_object(**where)["Body"].read()))


def test_the_cluster_stands_whole_without_a_machine(standing: Standing) -> None:
    assert counts(ids(standing.lab)) == WHOLE
    assert instances(standing.lab) == []
    (budget,) = standing.lab.client("budgets").describe_budgets(AccountId="123456789012")["Budgets"]
    assert budget["BudgetLimit"] == {"Amount": "250.00", "Unit": "USD"}


def test_the_alarm_is_told_once_with_the_tag_that_it_needs(standing: Standing) -> None:
    assert standing.aws.ensure(SPEC, story=standing.told.append) == GROUP
    assert [line for line in standing.told if "Budgets" in line] == [
        "AWS Budgets warns who@example.com over 250 USD a month for all of gpucloud in us-east-1, once the"
        " account's owner has activated the cost allocation tag gpucloud:managed (Billing console)"
    ]


def test_roles_stand_under_the_accounts_boundary(standing: Standing) -> None:
    iam = standing.lab.client("iam")
    roles = [iam.get_role(RoleName=name)["Role"] for name in ("gpucloud-digits-us-east-1", drill_role(REGION))]
    bounds = {role["PermissionsBoundary"]["PermissionsBoundaryArn"] for role in roles}
    assert bounds == {"arn:aws:iam::123456789012:policy/gpucloud-boundary"}


def test_a_machines_role_is_what_the_printed_policy_says(standing: Standing) -> None:
    policy = standing.lab.client("iam").get_role_policy(RoleName="gpucloud-digits-us-east-1", PolicyName="job")
    bucket, _, prefix = STORE.removeprefix("s3://").partition("/")
    printed = node_policy(
        partition="aws", account="123456789012", regions=(REGION,), cluster="gpucloud-digits", bucket=bucket,
        prefix=prefix, data=SPEC.data, unattended=SPEC.unattended,
    )  # fmt: skip
    assert normal(policy["PolicyDocument"]) == normal(printed)


def normal(document: Any) -> list[Any]:
    """Return a policy's statements so that order, and a list of one, tell nothing."""

    def flat(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: flat(one) for key, one in sorted(value.items())}
        return sorted(map(str, value)) if isinstance(value, list) else [str(value)]

    return sorted((flat(one) for one in document["Statement"]), key=str)


def test_what_stands_is_found_by_one_small_read_a_stack_and_nothing_changes(standing: Standing) -> None:
    before = len(standing.lab.calls)
    assert standing.aws.ensure(SPEC, story=quiet) == GROUP
    assert actions(standing.lab, before).count("GetObject") == 2
    assert changing(standing.lab, before) == []


def test_the_disk_that_is_sized_and_encrypted_is_the_images_own_root(standing: Standing) -> None:
    (template,) = standing.lab.client("ec2").describe_launch_template_versions(
        LaunchTemplateName="gpucloud-digits-efa0", Versions=["$Latest"]
    )["LaunchTemplateVersions"]
    disks = template["LaunchTemplateData"]["BlockDeviceMappings"]
    assert [(disk["DeviceName"], disk["Ebs"]["Encrypted"]) for disk in disks] == [("/dev/xvda", True)]


def test_the_base_of_a_cluster_is_not_removed_and_costs_nothing(standing: Standing) -> None:
    with pytest.raises(ProvisionError, match="the base in us-east-1 is in use by gpucloud-digits") as caught:
        standing.aws.destroy_base(REGION, story=quiet)
    assert caught.value.hint == "first `gpucloud down digits`"
    costs = standing.aws.base(REGION)
    assert costs is not None
    assert costs.monthly_usd == 0


def test_nothing_of_the_base_is_taken_for_a_part_of_a_job_called_drill(standing: Standing) -> None:
    roles = [one["RoleName"] for one in standing.lab.client("iam").list_roles()["Roles"]]
    assert drill_role(REGION) in roles
    assert find_cluster(Aws(region=REGION), REGION, "gpucloud-drill", {}) == {}


def test_expired_credentials_are_told_as_such(standing: Standing) -> None:
    standing.lab.faults.expire_credentials()
    with pytest.raises(CredentialsError):
        standing.aws.ensure(SPEC, story=quiet)


def test_lost_states_are_rebuilt_from_what_stands_and_nothing_is_made_twice(standing: Standing, tmp_path: Path) -> None:
    before = ids(standing.lab)
    for stack in ("base-us-east-1", "gpucloud-digits-us-east-1"):
        lose(standing.lab, f"{stack}/terraform.tfstate")
    told: list[str] = []
    provisioner(tmp_path / "other-machine", ALERT).ensure(SPEC, story=told.append)
    assert ids(standing.lab) == before, told


@pytest.mark.slow  # states that are lost are rebuilt in every run
def test_a_damaged_state_gives_way_to_its_last_whole_version(standing: Standing) -> None:
    before = ids(standing.lab)
    spoil(standing.lab, "base-us-east-1", lambda data: data[: len(data) // 2])
    vpc = before["vpc"][0].encode()
    spoil(standing.lab, "gpucloud-digits-us-east-1", lambda data: data.replace(vpc[-4:], vpc[-4:][::-1]) + b" ")
    told: list[str] = []
    standing.aws.ensure(SPEC, story=told.append)
    assert ids(standing.lab) == before
    assert told.count("its last whole version is back in place") == 2
    kept = standing.lab.client("s3").list_objects_v2(Bucket=STORE.removeprefix("s3://"), Prefix="terraform/")
    assert len([one for one in kept["Contents"] if ".damaged-" in one["Key"]]) == 2


def test_changed_tags_are_changed_on_what_stands(standing: Standing) -> None:
    before = ids(standing.lab)
    other = dataclasses.replace(SPEC, node_type="g5.xlarge", tags=(("gpucloud:job", "digits"), ("project", "speech")))
    standing.aws.ensure(other, story=quiet)
    group = standing.lab.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"][0]
    assert {"project": "speech"}.items() <= {tag["Key"]: tag["Value"] for tag in group["Tags"]}.items()
    assert ids(standing.lab) == before


def test_a_cluster_of_which_no_record_is_left_is_still_removed_and_the_base_outlives_it(
    shared: Standing, tmp_path: Path
) -> None:
    if "gpucloud-digits" not in shared.aws.clusters(REGION):
        shared.aws.ensure(SPEC, story=quiet)
    lose(shared.lab, "gpucloud-")
    provisioner(tmp_path / "other-machine", ALERT).destroy(GROUP, story=quiet)
    assert counts(ids(shared.lab)) == BASE
    shared.aws.destroy(GROUP, story=quiet)


@pytest.mark.slow  # the zone in which each thing stands is in unit tests and in the module's own
def test_the_gateway_stands_with_the_machines_that_need_it_and_zones_that_aws_refuses_are_left_out(
    standing: Standing, tmp_path: Path
) -> None:
    """In a region whose zone c takes no subnet and whose zone b has no NAT gateways; the machines are to stand in b."""
    region = "eu-west-1"
    refusal = f"Value ({region}c) for parameter availabilityZone is invalid."
    standing.lab.faults.add(
        "CreateSubnet", code="InvalidParameterValue", message=refusal, status=400, times=99, match=f"{region}c".encode()
    )
    said = "Nat Gateway is not available in this availability zone"
    standing.lab.faults.add("CreateNatGateway", code="NotAvailableInZone", message=said, status=400)
    efa = (EfaLayout(interfaces=4, cards=4),)
    spec = dataclasses.replace(SPEC, region=region, zones=(f"{region}b",), node_type="p4d.24xlarge", efa=efa)
    told: list[str] = []
    aws = provisioner(tmp_path / "home")
    try:
        aws.ensure(spec, story=told.append)
        assert zone_of_nat(Aws(region=region), region) == f"{region}a"
        assert f"{region}b has no NAT gateways: trying the next zone" in told
        assert f"{region}c takes no subnet of this account: going on without that zone" in told
        asked = [call for call in standing.lab.calls if call.action == "CreateNatGateway"]
        before = len(standing.lab.calls)
        provisioner(tmp_path / "other-machine").ensure(spec, story=quiet)
        assert changing(standing.lab, before) == []
        assert len(asked) == 2
    finally:
        standing.lab.faults.clear()
        aws.destroy(f"{region}/gpucloud-digits", story=quiet)
        aws.destroy_base(region, story=quiet)


def test_without_the_programs_for_session_manager_nothing_is_made(shared: Standing, tmp_path: Path) -> None:
    aws = provisioner(tmp_path / "home", tools=lambda: require_session_tools(lambda _: None))
    spec = dataclasses.replace(SPEC, efa=(EfaLayout(interfaces=32, cards=32),))
    before = len(shared.lab.calls)
    with pytest.raises(ToolMissing, match="aws and session-manager-plugin are not on PATH"):
        aws.ensure(spec, story=quiet)
    assert shared.lab.calls[before:] == []


def test_the_users_own_subnets_are_used_and_no_network_is_made(shared: Standing, tmp_path: Path) -> None:
    """In another region, which has a cluster of the same name and no base."""
    region = "us-west-2"
    before = counts(ids(shared.lab))
    ec2 = shared.lab.client("ec2", region)
    subnets = {one["AvailabilityZone"]: one["SubnetId"] for one in ec2.describe_subnets()["Subnets"]}
    own = (subnets[f"{region}a"], subnets[f"{region}b"])
    let_as_printed(shared.lab, regions=(), uses=Uses(subnets=own))
    aws = provisioner(tmp_path / "home", AwsChoices(subnets=own))
    spec = dataclasses.replace(SPEC, region=region, zones=(f"{region}a", f"{region}b"))
    aws.ensure(spec, story=quiet)
    group = shared.lab.client("autoscaling", region).describe_auto_scaling_groups()["AutoScalingGroups"][0]
    assert sorted(group["VPCZoneIdentifier"].split(",")) == sorted(own)
    assert ec2.describe_vpcs(Filters=[{"Name": "tag-key", "Values": ["gpucloud:managed"]}])["Vpcs"] == []
    aws.destroy(f"{region}/gpucloud-digits", story=quiet)
    assert counts(ids(shared.lab)) == before


def test_a_refusal_is_one_line_with_the_next_step_and_no_key_is_in_a_file(shared: Standing, tmp_path: Path) -> None:
    shared.lab.faults.add("CreateVpc", code="VpcLimitExceeded", status=400)
    home = tmp_path / "home"
    with pytest.raises(ProvisionError, match=r"VpcLimitExceeded") as caught:
        provisioner(home).ensure(dataclasses.replace(SPEC, region="eu-west-1", zones=()), story=quiet)
    assert "StatusCode" not in caught.value.message
    assert caught.value.exit_code == 13
    files = [path for path in home.rglob("*") if path.is_file() and "providers" not in path.parts]
    assert files
    assert [path for path in files if SECRET_KEY.encode() in path.read_bytes()] == []


@pytest.mark.slow  # a cluster without any record is removed in every run
def test_a_base_whose_state_is_lost_is_removed_whole_which_may_be_repeated(shared: Standing) -> None:
    if shared.aws.base(REGION) is None or shared.aws.clusters(REGION):
        shared.aws.ensure(SPEC, story=quiet)
        shared.aws.destroy(GROUP, story=quiet)
    lose(shared.lab, "base-us-east-1/terraform.tfstate")
    shared.aws.destroy_base(REGION, story=quiet)
    shared.aws.destroy_base(REGION, story=quiet)
    assert shared.aws.base(REGION) is None
    assert counts(ids(shared.lab)) == {}
    assert shared.lab.client("budgets").describe_budgets(AccountId="123456789012").get("Budgets", []) == []
