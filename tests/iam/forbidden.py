"""What the printed policies must not allow: calls that a holder could make, each with what would come of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

from tests.iam.needs import Asked, Params, Thing

ACCOUNT = "123456789012"
REGION = "us-east-1"
BOUNDARY = f"arn:aws:iam::{ACCOUNT}:policy/gpucloud-boundary"
# What a company's user brings: a bucket under a key of the company's, and a profile, which has a path as its role has.
BUCKET = "research-kms"
KEY = f"arn:aws:kms:{REGION}:{ACCOUNT}:key/8c1a2b3d-0001-4c5d-9e6f-aabbccddeeff"
OTHERS_KEY = f"arn:aws:kms:{REGION}:{ACCOUNT}:key/11111111-0001-4c5d-9e6f-aabbccddeeff"
PROFILE = f"arn:aws:iam::{ACCOUNT}:instance-profile/research/nodes"
ROLE = f"arn:aws:iam::{ACCOUNT}:role/research/nodes"
_MANAGED = {"gpucloud:managed": "true", "gpucloud:cluster": "gpucloud-digits"}
_OTHER = {"team": "payments"}


class SomeAccount:
    """Facts of an account where names tell what things are: `ours` in one says that it is gpucloud's own."""

    def ec2(self, region: str, kind: str, name: str) -> Thing:
        """Return the thing of that name, whose kind its name tells where nothing else does."""
        kind = kind or {"i": "instance", "sg": "security-group", "vpc": "vpc"}.get(name.partition("-")[0], "vpc")
        return Thing(arn=f"arn:aws:ec2:{region}:{ACCOUNT}:{kind}/{name}", kind=kind, tags=_tags(name))

    def group(self, region: str, params: Params) -> Thing:
        """Return the group that a call names, or that the machine is in which it names; a new one has no id yet."""
        name = str(params.get("AutoScalingGroupName") or params.get("Tags.member.1.ResourceId") or "gpucloud-ours")
        if "AutoScalingGroupName" not in params and "ours" not in str(params.get("InstanceId", "ours")):
            name = "payments"
        born, stem = "new" in name, f"arn:aws:autoscaling:{region}:{ACCOUNT}:autoScalingGroup"
        ours = {**_MANAGED, "gpucloud:cluster": name} if name.startswith("gpucloud-") else _OTHER
        tags = {} if born else _OTHER if "payments" in name else ours
        arn = f"{stem}:{'*' if born else '0-0'}:autoScalingGroupName/{name}"
        return Thing(arn=arn, kind="autoScalingGroup", tags=tags)

    def template(self, region: str, named: Params) -> tuple[str, Mapping[str, Any]]:
        """Return a template: its name tells what is wrong with it."""
        name = str(named.get("LaunchTemplateName") or named.get("LaunchTemplateId") or "lt-ours")
        kinds = [] if "untagged" in name else ["instance", "volume", "network-interface"]
        tags = [{"Key": "gpucloud:managed", "Value": "true"}]
        key = KEY if "keyed" in name else OTHERS_KEY if "locked" in name else None
        return name, {
            "ImageId": "ami-1",
            "MetadataOptions": {"HttpTokens": "optional" if "imdsv1" in name else "required"},
            "IamInstanceProfile": {"Name": next((one for one in ("admin", "nodes") if one in name), "gpucloud-digits")},
            "BlockDeviceMappings": [{"Ebs": {"KmsKeyId": key} if key else {}}],
            "TagSpecifications": [{"ResourceType": kind, "Tags": tags} for kind in kinds],
            "NetworkInterfaces": [{"Groups": ["sg-payments" if "firewall" in name else "sg-ours"]}],
        }

    def boundary(self, role: str) -> str | None:
        """Return the boundary of a role."""
        return BOUNDARY if "bound" in role else None

    def profile(self, name: str) -> str:
        """Return a profile's ARN: the user's own has a path."""
        return f"arn:aws:iam::{ACCOUNT}:instance-profile/{self.role_of_profile(name)}"

    def role_of_profile(self, profile: str) -> str:
        """Return a profile's role, of its own name and path."""
        return f"research/{profile}" if profile == "nodes" else profile

    def key_of(self, bucket: str) -> str | None:
        """Return the key of the user's own bucket; others are under AWS's."""
        return KEY if bucket == BUCKET else None

    def fis(self, region: str, kind: str, name: str) -> Thing:
        """Return a drill or its template."""
        return Thing(arn=f"arn:aws:fis:{region}:{ACCOUNT}:{kind}/{name}", kind=kind, tags=_tags(name))

    def stands(self, bucket: str, key: str) -> bool:
        """Every object is there."""
        del bucket, key
        return True


def _tags(name: str) -> dict[str, str]:
    return dict(_MANAGED if "ours" in name else _OTHER)


@dataclass(frozen=True, slots=True)
class Call:
    """One call: what would come of it, and what it says. One that is `fine` is the table's own check: it must pass."""

    why: str
    service: str
    action: str
    params: Mapping[str, Any]
    region: str = REGION
    fine: bool = False

    @property
    def asked(self) -> Asked:
        """The call as IAM meets it."""
        return Asked(service=self.service, action=self.action, params=self.params, region=self.region, account=ACCOUNT)


def _born(kind: str, tagged: str = "gpucloud:managed") -> dict[str, str]:
    stem = "TagSpecification.1"
    return {f"{stem}.ResourceType": kind, f"{stem}.Tag.1.Key": tagged, f"{stem}.Tag.1.Value": "true"}


def _group(name: str, template: str, *, tagged: bool = True, version: str | None = "1", **more: str) -> dict[str, str]:
    tags = {"Tags.member.1.Key": "gpucloud:managed", "Tags.member.1.Value": "true"} if tagged else {}
    template_ = {"LaunchTemplate.LaunchTemplateName": template} if template else {}
    template_ |= {"LaunchTemplate.Version": version} if version and template else {}
    return {"AutoScalingGroupName": name, "MaxSize": "4", **template_, **tags, **more}


def _tag(of: str, key: str = "gpucloud:managed") -> dict[str, str]:
    return {"ResourceId.1": of, "Tag.1.Key": key, "Tag.1.Value": "true"}


def _on_group(name: str) -> dict[str, str]:
    return {"Tags.member.1.ResourceId": name, "Tags.member.1.Key": "gpucloud:managed", "Tags.member.1.Value": "true"}


def _s3(key: str, bucket: str = f"gpucloud-{ACCOUNT}-{REGION}", **more: str) -> dict[str, str]:
    return {"Bucket": bucket, "Key": key, **more}


_FLEET = {"LaunchTemplateConfigs.1.LaunchTemplateSpecification.LaunchTemplateName": "lt-payments"}
_FIS = {"actions": {"x": {"actionId": "aws:ec2:terminate-instances"}}, "tags": {"gpucloud:managed": "true"}}


def _tags_of(drill: str) -> str:
    return "POST /tags/" + quote(f"arn:aws:fis:{REGION}:{ACCOUNT}:{drill}", safe="")


CALLERS = (
    # ---- roles: the way to an administrator's rights
    Call("a role without a boundary", "iam", "CreateRole", {"RoleName": "gpucloud-x"}),
    Call("a role under another boundary", "iam", "CreateRole", {
        "RoleName": "gpucloud-x", "PermissionsBoundary": "arn:aws:iam::aws:policy/AdministratorAccess"}),
    Call("a role outside our names", "iam", "CreateRole", {"RoleName": "admin", "PermissionsBoundary": BOUNDARY}),
    Call("rights for a role without a boundary", "iam", "PutRolePolicy", {"RoleName": "gpucloud-free"}),
    Call("rights for somebody's role", "iam", "PutRolePolicy", {"RoleName": "admin-bound"}),
    Call("a role's boundary lifted", "iam", "DeleteRolePermissionsBoundary", {"RoleName": "gpucloud-bound"}),
    Call("a role's boundary widened", "iam", "PutRolePermissionsBoundary", {
        "RoleName": "gpucloud-bound", "PermissionsBoundary": "arn:aws:iam::aws:policy/AdministratorAccess"}),
    Call("the boundary itself rewritten", "iam", "CreatePolicyVersion", {"PolicyArn": BOUNDARY}),
    Call("the boundary's default version", "iam", "SetDefaultPolicyVersion", {"PolicyArn": BOUNDARY}),
    Call("the boundary deleted", "iam", "DeletePolicy", {"PolicyArn": BOUNDARY}),
    Call("a managed policy attached", "iam", "AttachRolePolicy", {
        "RoleName": "gpucloud-bound", "PolicyArn": "arn:aws:iam::aws:policy/AdministratorAccess"}),
    Call("who may become a role", "iam", "UpdateAssumeRolePolicy", {"RoleName": "gpucloud-bound"}),
    Call("somebody's role in a profile of ours", "iam", "AddRoleToInstanceProfile", {
        "InstanceProfileName": "gpucloud-digits", "RoleName": "admin"}),
    Call("a role in somebody's profile", "iam", "AddRoleToInstanceProfile", {
        "InstanceProfileName": "payments", "RoleName": "gpucloud-digits"}),
    Call("somebody's role deleted", "iam", "DeleteRole", {"RoleName": "admin"}),
    Call("a user", "iam", "CreateUser", {"UserName": "mallory"}),
    Call("an access key", "iam", "CreateAccessKey", {"UserName": "root"}),
    Call("another service's role", "iam", "CreateServiceLinkedRole", {"AWSServiceName": "ecs.amazonaws.com"}),
    Call("an administrator's profile by a template", "autoscaling", "CreateAutoScalingGroup",
         _group("gpucloud-new", "lt-ours-admin")),
    Call("the same in a group that stands", "autoscaling", "UpdateAutoScalingGroup",
         _group("gpucloud-x", "lt-ours-admin", tagged=False)),
    Call("our role passed to another service", "lambda", "CreateFunction", {}),
    Call("a drill with somebody's role", "fis", "POST /experimentTemplates", {
        **_FIS, "roleArn": f"arn:aws:iam::{ACCOUNT}:role/admin"}),
    Call("somebody's drill made ours", "fis", _tags_of("experiment-template/EXT-payments"), {
        "tags": {"gpucloud:managed": "true"}}),
    Call("somebody's running drill made ours", "fis", _tags_of("experiment/EXP-payments"), {
        "tags": {"gpucloud:managed": "true"}}),
    Call("a drill of another kind", "fis", "POST /experimentTemplates", _FIS),
    Call("a drill without our tag", "fis", "POST /experimentTemplates", {
        "actions": {"x": {"actionId": "aws:ec2:send-spot-instance-interruptions"}}}),
    Call("somebody's drill started", "fis", "POST /experiments", {
        "experimentTemplateId": "payments", "tags": {"gpucloud:managed": "true"}}),
    # ---- machines
    Call("a machine without our tag", "ec2", "RunInstances", {
        "ImageId": "ami-1", "MetadataOptions.HttpTokens": "required", "SubnetId": "subnet-ours"}),
    Call("a machine with the old metadata service", "ec2", "RunInstances", {
        "ImageId": "ami-1", "SubnetId": "subnet-ours", **_born("instance")}),
    Call("a machine with an administrator's profile", "ec2", "RunInstances", {
        "LaunchTemplate.LaunchTemplateName": "lt-ours-admin", "SubnetId": "subnet-ours"}),
    Call("a machine in somebody's network", "ec2", "RunInstances", {
        "LaunchTemplate.LaunchTemplateName": "lt-ours", "SubnetId": "subnet-payments"}),
    Call("a machine behind somebody's firewall", "ec2", "RunInstances", {
        "LaunchTemplate.LaunchTemplateName": "lt-ours-firewall", "SubnetId": "subnet-ours"}),
    Call("a machine of somebody's template", "ec2", "RunInstances", {
        "LaunchTemplate.LaunchTemplateName": "lt-payments", "SubnetId": "subnet-ours"}),
    Call("a machine with somebody's key", "ec2", "RunInstances", {
        "LaunchTemplate.LaunchTemplateName": "lt-ours", "SubnetId": "subnet-ours", "KeyName": "payments"}),
    Call("a fleet of somebody's template", "ec2", "CreateFleet", _FLEET),
    Call("a fleet of an untagged template", "ec2", "CreateFleet", {
        "LaunchTemplateConfigs.1.LaunchTemplateSpecification.LaunchTemplateName": "lt-ours-untagged"}),
    Call("a fleet whose machines bear another tag", "ec2", "CreateFleet", {
        "LaunchTemplateConfigs.1.LaunchTemplateSpecification.LaunchTemplateName": "lt-ours",
        "TagSpecification.1.ResourceType": "instance", "TagSpecification.1.Tag.1.Key": "gpucloud:managed",
        "TagSpecification.1.Tag.1.Value": "false"}),
    Call("somebody's machine ended", "ec2", "TerminateInstances", {"InstanceId.1": "i-payments"}),
    Call("ours and somebody's machine ended", "ec2", "TerminateInstances", {
        "InstanceId.1": "i-ours", "InstanceId.2": "i-payments"}),
    Call("somebody's console", "ec2", "GetConsoleOutput", {"InstanceId": "i-payments"}),
    Call("another profile on a machine", "ec2", "AssociateIamInstanceProfile", {"InstanceId": "i-ours"}),
    Call("a machine's user data", "ec2", "ModifyInstanceAttribute", {"InstanceId": "i-ours"}),
    Call("a disk copied", "ec2", "CreateSnapshot", {"VolumeId": "vol-payments"}),
    Call("somebody's disk deleted", "ec2", "DeleteVolume", {"VolumeId": "vol-payments"}),
    Call("somebody's machine entered", "ssm", "StartSession", {
        "Target": "i-payments", "DocumentName": "AWS-StartSSHSession"}),
    Call("a command on a machine", "ssm", "SendCommand", {"InstanceId": "i-ours"}),
    Call("a secret parameter", "ssm", "GetParameter", {"Name": "/payments/password"}),
    # ---- networks
    Call("somebody's group opened", "ec2", "AuthorizeSecurityGroupIngress", {"GroupId": "sg-payments"}),
    Call("the same by a rule with our tag", "ec2", "AuthorizeSecurityGroupIngress", {
        "GroupId": "sg-payments", **_born("security-group-rule")}),
    Call("a rule without our tag", "ec2", "AuthorizeSecurityGroupIngress", {
        "GroupId": "sg-ours", **_born("security-group-rule", "team")}),
    Call("somebody's rules taken away", "ec2", "RevokeSecurityGroupIngress", {"GroupId": "sg-payments"}),
    Call("somebody's group made ours", "ec2", "CreateTags", {
        "ResourceId.1": "sg-payments", "Tag.1.Key": "gpucloud:managed", "Tag.1.Value": "true"}),
    Call("somebody's machine made ours", "ec2", "CreateTags", _tag("i-payments")),
    Call("somebody's machine relieved", "ec2", "CreateTags", _tag("i-payments", "gpucloud:relieved")),
    Call("ours and somebody's machine relieved", "ec2", "CreateTags", {
        **_tag("i-ours", "gpucloud:relieved"), "ResourceId.2": "i-payments"}),
    Call("a tag of somebody's machine taken away", "ec2", "DeleteTags", {
        "ResourceId.1": "i-payments", "Tag.1.Key": "team"}),
    Call("somebody's network made ours", "ec2", "CreateTags", {
        "ResourceId.1": "vpc-payments", "Tag.1.Key": "gpucloud:managed", "Tag.1.Value": "true"}),
    Call("a network without our tag", "ec2", "CreateVpc", {"CidrBlock": "10.0.0.0/16"}),
    Call("a subnet in somebody's network", "ec2", "CreateSubnet", {"VpcId": "vpc-payments", **_born("subnet")}),
    Call("a group in somebody's network", "ec2", "CreateSecurityGroup", {
        "VpcId": "vpc-payments", **_born("security-group")}),
    Call("somebody's network deleted", "ec2", "DeleteVpc", {"VpcId": "vpc-payments"}),
    Call("a way into somebody's network", "ec2", "CreateRoute", {"RouteTableId": "rtb-payments"}),
    Call("networks joined", "ec2", "CreateVpcPeeringConnection", {"VpcId": "vpc-ours"}),
    # ---- groups
    Call("a group outside our names", "autoscaling", "CreateAutoScalingGroup", _group("payments", "lt-ours")),
    Call("a group without our tag", "autoscaling", "CreateAutoScalingGroup",
         _group("gpucloud-new", "lt-ours", tagged=False)),
    Call("somebody's group resized", "autoscaling", "SetDesiredCapacity", {"AutoScalingGroupName": "payments"}),
    Call("somebody's group deleted", "autoscaling", "DeleteAutoScalingGroup", {"AutoScalingGroupName": "payments"}),
    Call("somebody's group launches", "autoscaling", "LaunchInstances", {"AutoScalingGroupName": "payments"}),
    Call("somebody's member ended", "autoscaling", "TerminateInstanceInAutoScalingGroup", {"InstanceId": "i-payments"}),
    Call("somebody's group made ours", "autoscaling", "CreateOrUpdateTags", _on_group("payments")),
    Call("somebody's group whose name begins as ours made ours", "autoscaling", "CreateOrUpdateTags",
         _on_group("gpucloud-payments")),
    *(
        Call(f"a group that starts by {version or 'no version'}", "autoscaling", action,
             _group(name, "lt-ours", tagged=action.startswith("Create"), version=version))
        for version in ("$Latest", "$Default", None)
        for action, name in (("CreateAutoScalingGroup", "gpucloud-new"), ("UpdateAutoScalingGroup", "gpucloud-ours"))
    ),
    Call("a group by somebody's launch configuration", "autoscaling", "CreateAutoScalingGroup",
         _group("gpucloud-new", "", LaunchConfigurationName="payments")),
    Call("a group of ours by it", "autoscaling", "UpdateAutoScalingGroup",
         _group("gpucloud-ours", "", tagged=False, LaunchConfigurationName="payments")),
    Call("a group like somebody's machine", "autoscaling", "CreateAutoScalingGroup",
         _group("gpucloud-new", "", InstanceId="i-payments")),
    Call("a group that answers for somebody's service", "autoscaling", "CreateAutoScalingGroup",
         _group("gpucloud-new", "lt-ours", **{"TargetGroupARNs.member.1": "payments"})),
    Call("a group behind somebody's load balancer", "autoscaling", "CreateAutoScalingGroup",
         _group("gpucloud-new", "lt-ours", **{"LoadBalancerNames.member.1": "payments"})),
    # ---- stores, money, elsewhere
    Call("somebody's object", "s3", "GetObject", _s3("secret", "payments")),
    Call("somebody's object overwritten", "s3", "PutObject", _s3("secret", "payments")),
    Call("somebody's bucket listed", "s3", "ListObjectsV2", {"Bucket": "payments"}),
    Call("somebody's bucket opened", "s3", "PutBucketPolicy", {"Bucket": "payments"}),
    Call("every bucket listed", "s3", "ListBuckets", {}),
    Call("somebody's budget", "budgets", "DeleteBudget", {"AccountId": ACCOUNT, "BudgetName": "payments"}),
    Call("another service's quota", "servicequotas", "RequestServiceQuotaIncrease", {
        "ServiceCode": "lambda", "QuotaCode": "L-1"}),
    Call("machines in another region", "ec2", "DescribeInstances", {}, region="eu-west-1"),
    Call("a network in another region", "ec2", "CreateVpc", _born("vpc"), region="eu-west-1"),
    # ---- and what must pass, or the table would prove nothing
    Call("a role under the boundary", "iam", "CreateRole", {
        "RoleName": "gpucloud-x", "PermissionsBoundary": BOUNDARY}, fine=True),
    Call("rights for it", "iam", "PutRolePolicy", {"RoleName": "gpucloud-bound"}, fine=True),
    Call("a machine of ours", "ec2", "RunInstances", {
        "LaunchTemplate.LaunchTemplateName": "lt-ours", "SubnetId": "subnet-ours"}, fine=True),
    Call("a group of ours", "autoscaling", "CreateAutoScalingGroup", _group("gpucloud-new", "lt-ours"), fine=True),
    Call("another version for it", "autoscaling", "UpdateAutoScalingGroup",
         _group("gpucloud-ours", "lt-ours", tagged=False, version="2"), fine=True),
    Call("other sizes of it", "autoscaling", "UpdateAutoScalingGroup",
         _group("gpucloud-ours", "", tagged=False), fine=True),
    Call("its tags", "autoscaling", "CreateOrUpdateTags", _on_group("gpucloud-ours"), fine=True),
    Call("a machine of ours relieved", "ec2", "CreateTags", _tag("i-ours", "gpucloud:relieved"), fine=True),
    Call("a drill", "fis", "POST /experimentTemplates", {
        "actions": {"x": {"actionId": "aws:ec2:send-spot-instance-interruptions"}},
        "roleArn": f"arn:aws:iam::{ACCOUNT}:role/gpucloud-base.drill-{REGION}",
        "tags": {"gpucloud:managed": "true"}}, fine=True),
    Call("it started", "fis", "POST /experiments", {
        "experimentTemplateId": "EXTours", "tags": {"gpucloud:managed": "true"}}, fine=True),
    Call("a launch", "autoscaling", "LaunchInstances", {
        "AutoScalingGroupName": "gpucloud-ours", "SubnetIds.member.1": "subnet-ours"}, fine=True),
    Call("a rule in a group of ours", "ec2", "AuthorizeSecurityGroupIngress", {
        "GroupId": "sg-ours", **_born("security-group-rule")}, fine=True),
    Call("a machine of ours ended", "ec2", "TerminateInstances", {"InstanceId.1": "i-ours"}, fine=True),
    Call("a machine of ours entered", "ssm", "StartSession", {
        "Target": "i-ours", "DocumentName": "AWS-StartSSHSession"}, fine=True),
)  # fmt: skip

_JOB = "jobs/digits"
_ELSEWHERE = "jobs/other"
_DIGITS = {"AutoScalingGroupName": "gpucloud-digits"}

NODES = (
    *(
        Call(f"{name} written", "s3", "PutObject", _s3(f"{_JOB}/control/{name}"))
        for name in ("order.json", "spec.yaml", "code/0", "data/0", "armings/1.json", "ledger/x.json")
    ),
    *(
        Call(f"{name} deleted", "s3", "DeleteObject", _s3(f"{_JOB}/{name}"))
        for name in ("control/order.json", "control/armings/1.json", "control/ledger/x.json", "state.json",
                     "ledger/x.json", "events/1.json", "logs/0001/rank-0")
    ),
    Call("a version of the order deleted", "s3", "DeleteObject", _s3(f"{_JOB}/control/order.json", versionId="1")),
    *(
        Call(f"{action} of another job", "s3", action, _s3(f"{_ELSEWHERE}/{name}"))
        for action in ("GetObject", "PutObject", "DeleteObject")
        for name in ("state.json", "control/order.json", "checkpoints/commit/1.json")
    ),
    Call("another job whose name begins alike", "s3", "PutObject", _s3("jobs/digits-2/checkpoints/x")),
    Call("another job's names", "s3", "ListObjectsV2", {
        "Bucket": f"gpucloud-{ACCOUNT}-{REGION}", "prefix": f"{_ELSEWHERE}/"}),
    Call("all jobs' names", "s3", "ListObjectsV2", {"Bucket": f"gpucloud-{ACCOUNT}-{REGION}", "prefix": "jobs/"}),
    Call("every name", "s3", "ListObjectsV2", {"Bucket": f"gpucloud-{ACCOUNT}-{REGION}"}),
    Call("old versions", "s3", "ListObjectVersions", {"Bucket": f"gpucloud-{ACCOUNT}-{REGION}"}),
    Call("an old version", "s3", "GetObject", _s3(f"{_JOB}/state.json", versionId="1")),
    Call("the lifetimes of objects", "s3", "PutBucketLifecycleConfiguration", {
        "Bucket": f"gpucloud-{ACCOUNT}-{REGION}"}),
    Call("the bucket's versions off", "s3", "PutBucketVersioning", {"Bucket": f"gpucloud-{ACCOUNT}-{REGION}"}),
    Call("the bucket's policy", "s3", "PutBucketPolicy", {"Bucket": f"gpucloud-{ACCOUNT}-{REGION}"}),
    Call("what new machines run", "s3", "PutObject", _s3("clusters/gpucloud-digits/gpucloud-1.zip")),
    Call("what new machines are told", "s3", "PutObject", _s3("clusters/gpucloud-digits/node.json")),
    Call("what drives", "s3", "PutObject", _s3("clusters/gpucloud-digits/drive.json")),
    Call("a peer's host key", "s3", "PutObject", _s3("clusters/gpucloud-digits/hosts/AROAOURS:i-peer")),
    Call("Terraform's state", "s3", "GetObject", _s3("terraform/gpucloud-digits-us-east-1/terraform.tfstate")),
    Call("more machines", "autoscaling", "UpdateAutoScalingGroup", {**_DIGITS, "MaxSize": "9"}),
    Call("a later shut-off", "autoscaling", "PutScheduledUpdateGroupAction", {**_DIGITS, "MaxSize": "0"}),
    Call("no shut-off", "autoscaling", "DeleteScheduledAction", _DIGITS),
    Call("schedules suspended", "autoscaling", "SuspendProcesses", _DIGITS),
    Call("protected from scale-in", "autoscaling", "SetInstanceProtection", _DIGITS),
    Call("out of the group", "autoscaling", "DetachInstances", _DIGITS),
    Call("into standby", "autoscaling", "EnterStandby", _DIGITS),
    Call("a hook that waits", "autoscaling", "PutLifecycleHook", _DIGITS),
    Call("a warm pool", "autoscaling", "PutWarmPool", _DIGITS),
    Call("a policy that scales", "autoscaling", "PutScalingPolicy", _DIGITS),
    Call("the group's tags", "autoscaling", "CreateOrUpdateTags", {
        "Tags.member.1.ResourceId": "gpucloud-digits", "Tags.member.1.Key": "gpucloud:cluster",
        "Tags.member.1.Value": "x"}),
    Call("a launch", "autoscaling", "LaunchInstances", _DIGITS),
    Call("another job's level", "autoscaling", "SetDesiredCapacity", {"AutoScalingGroupName": "gpucloud-other"}),
    Call("machines of its own", "ec2", "RunInstances", {"LaunchTemplate.LaunchTemplateName": "lt-ours"}),
    Call("another version of the template", "ec2", "CreateLaunchTemplateVersion", {"LaunchTemplateName": "lt-ours"}),
    Call("tags", "ec2", "CreateTags", {"ResourceId.1": "i-ours", "Tag.1.Key": "x", "Tag.1.Value": "y"}),
    Call("a peer relieved", "ec2", "CreateTags", _tag("i-ours", "gpucloud:relieved")),
    Call("a relieved machine's tag taken away", "ec2", "DeleteTags", {
        "ResourceId.1": "i-ours", "Tag.1.Key": "gpucloud:relieved"}),
    Call("its firewall", "ec2", "AuthorizeSecurityGroupIngress", {"GroupId": "sg-ours"}),
    Call("its role's rights", "iam", "PutRolePolicy", {"RoleName": "gpucloud-digits-us-east-1"}),
    Call("another role", "iam", "CreateRole", {"RoleName": "gpucloud-x", "PermissionsBoundary": BOUNDARY}),
    Call("a parameter", "ssm", "GetParameter", {"Name": "/payments/password"}),
    Call("a session on a peer", "ssm", "StartSession", {"Target": "i-ours", "DocumentName": "AWS-StartSSHSession"}),
    Call("a checkpoint", "s3", "PutObject", _s3(f"{_JOB}/checkpoints/data/1/1/rank-0"), fine=True),
    Call("an output", "s3", "PutObject", _s3(f"{_JOB}/outputs/files/x"), fine=True),
    Call("an old checkpoint gone", "s3", "DeleteObject", _s3(f"{_JOB}/checkpoints/data/0/1/rank-0"), fine=True),
    Call("the order read", "s3", "GetObject", _s3(f"{_JOB}/control/order.json"), fine=True),
    Call("its own level", "autoscaling", "SetDesiredCapacity", _DIGITS, fine=True),
)  # fmt: skip

ATTENDED = (
    *(
        Call(f"{name} written while attended", "s3", "PutObject", _s3(f"{_JOB}/{name}"))
        for name in ("state.json", "ledger/x.json", "events/1.json", "logs/0001/x", "metrics/0001/x",
                     "launches/0001/x", "profiles/x", "request.json", "spec.yaml", "billed.json")
    ),
    Call("machines listed", "ec2", "DescribeInstances", {}),
    Call("a peer ended", "autoscaling", "TerminateInstanceInAutoScalingGroup", {"InstanceId": "i-ours"}),
)  # fmt: skip

DRIVING = (
    *(
        Call(f"{name} written while driving", "s3", "PutObject", _s3(f"{_JOB}/{name}"), fine=True)
        for name in ("state.json", "ledger/x.json", "events/1.json", "logs/0001/x", "metrics/0001/x")
    ),
    *(
        Call(f"{name} written while driving", "s3", "PutObject", _s3(f"{_JOB}/{name}"))
        for name in ("request.json", "spec.yaml", "billed.json", "control/ledger/x.json")
    ),
    Call("another job's machine ended", "autoscaling", "TerminateInstanceInAutoScalingGroup", {
        "InstanceId": "i-payments"}),
    Call("a machine ended by EC2", "ec2", "TerminateInstances", {"InstanceId.1": "i-ours"}),
)  # fmt: skip

# Nobody's but theirs who name the key or are reached by sessions.
WITHOUT_KEY = (
    Call("a disk under a key", "autoscaling", "CreateAutoScalingGroup", _group("gpucloud-new", "lt-ours-keyed")),
    Call("an object under a key", "s3", "GetObject", _s3("jobs/digits/state.json", BUCKET)),
)
WITHOUT_SESSIONS = tuple(
    Call(f"{action} of AWS's agent", "ssmmessages", action, {})
    for action in ("CreateControlChannel", "CreateDataChannel", "OpenControlChannel", "OpenDataChannel")
)
_KEY_BY_ITSELF = tuple(
    Call(f"{action} with the key, past S3 and EC2", "kms", action, {"KeyId": KEY})
    for action in ("Decrypt", "GenerateDataKey", "ReEncryptFrom", "CreateGrant", "RevokeGrant", "PutKeyPolicy",
                   "DisableKey", "ScheduleKeyDeletion")
)  # fmt: skip

KEYED_CALLERS = (
    *_KEY_BY_ITSELF,
    Call("a disk under somebody's key", "autoscaling", "CreateAutoScalingGroup",
         _group("gpucloud-new", "lt-ours-nodes-locked")),
    Call("a launch with it", "autoscaling", "UpdateAutoScalingGroup",
         _group("gpucloud-ours", "lt-ours-nodes-locked", tagged=False)),
    *(
        Call(f"{action} of the user's own bucket", "s3", action, {"Bucket": BUCKET})
        for action in ("PutBucketPolicy", "PutBucketEncryption", "PutBucketVersioning",
                       "PutBucketLifecycleConfiguration", "PutPublicAccessBlock", "DeleteBucket")
    ),
    Call("an object written under the key", "s3", "PutObject", _s3("jobs/digits/state.json", BUCKET), fine=True),
    Call("an object read under the key", "s3", "GetObject", _s3("jobs/digits/state.json", BUCKET), fine=True),
    Call("a large one", "s3", "CreateMultipartUpload", _s3("jobs/digits/control/code/0", BUCKET), fine=True),
    Call("a large one's last part", "s3", "CompleteMultipartUpload", _s3("jobs/digits/control/code/0", BUCKET),
         fine=True),
)  # fmt: skip

MAKERS = (
    Call("a group whose disks are under the key", "autoscaling", "CreateAutoScalingGroup",
         _group("gpucloud-new", "lt-ours-keyed"), fine=True),
    Call("a group with somebody's profile", "autoscaling", "CreateAutoScalingGroup",
         _group("gpucloud-new", "lt-ours-nodes-keyed")),
)  # fmt: skip

OWN_CALLERS = (
    Call("a role, by who makes none", "iam", "CreateRole", {
        "RoleName": "gpucloud-x", "PermissionsBoundary": BOUNDARY}),
    Call("rights for a role of gpucloud's", "iam", "PutRolePolicy", {"RoleName": "gpucloud-bound"}),
    Call("a role of gpucloud's deleted", "iam", "DeleteRole", {"RoleName": "gpucloud-bound"}),
    Call("a profile made", "iam", "CreateInstanceProfile", {"InstanceProfileName": "gpucloud-x"}),
    Call("the own profile's role exchanged", "iam", "AddRoleToInstanceProfile", {
        "InstanceProfileName": "nodes", "RoleName": "admin"}),
    Call("the own profile deleted", "iam", "DeleteInstanceProfile", {"InstanceProfileName": "nodes"}),
    Call("more rights for its role", "iam", "PutRolePolicy", {"RoleName": "research/nodes"}),
    Call("who may become its role", "iam", "UpdateAssumeRolePolicy", {"RoleName": "research/nodes"}),
    Call("its role handed to drills", "fis", "POST /experimentTemplates", {
        "actions": {"x": {"actionId": "aws:ec2:send-spot-instance-interruptions"}}, "roleArn": ROLE,
        "tags": {"gpucloud:managed": "true"}}),
    Call("machines with a role of gpucloud's", "autoscaling", "CreateAutoScalingGroup",
         _group("gpucloud-new", "lt-ours")),
    Call("the own profile seen", "iam", "GetInstanceProfile", {"InstanceProfileName": "nodes"}, fine=True),
    Call("a group with it, whose disks are under the key", "autoscaling", "CreateAutoScalingGroup",
         _group("gpucloud-new", "lt-ours-nodes-keyed"), fine=True),
    Call("a role of gpucloud's seen", "iam", "GetRole", {"RoleName": "gpucloud-base.drill-us-east-1"}, fine=True),
)  # fmt: skip

KEYED_NODES = (
    *(
        replace(call, params={**call.params, "Bucket": BUCKET} if "Bucket" in call.params else call.params)
        for call in (*NODES, *DRIVING)
    ),
    *_KEY_BY_ITSELF,
    *(replace(call, fine=True) for call in WITHOUT_SESSIONS),
    Call("told of itself", "ssm", "UpdateInstanceInformation", {"InstanceId": "i-ours"}, fine=True),
    Call("a command on a peer", "ssm", "SendCommand", {"InstanceId": "i-ours"}),
    Call("a large checkpoint", "s3", "UploadPart", _s3(f"{_JOB}/checkpoints/data/1/1/rank-0", BUCKET), fine=True),
)
