"""Things by hand in an emulated AWS account: one of every kind that a cluster has, tagged as its maker says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.lab.aws import Lab
from tests.lab.aws.world import REGION

KINDS = {
    *("instance", "volume", "network-interface", "launch-template", "security-group", "key-pair", "placement-group"),
    *("auto-scaling-group", "role", "instance-profile"),
}
ANYONE = '{"Version": "2012-10-17", "Statement": []}'


def tags(job: str, store: str, **others: str) -> dict[str, str]:
    """Return gpucloud's own tags of a job; `others` replace them, by the part after the colon."""
    own = {"managed": "true", "cluster": f"gpucloud-{job}", "job": job, "store": store}
    return {f"gpucloud:{name}": value for name, value in {**own, **others}.items()}


class Hand:
    """Whoever makes things by hand in one region; its clients are made once."""

    def __init__(self, lab: Lab, region: str = REGION) -> None:
        self.region = region
        self.ec2, self.iam = lab.client("ec2", region), lab.client("iam")
        self.scaling = lab.client("autoscaling", region)
        self.image = str(self.ec2.describe_images(Owners=["099720109477"])["Images"][0]["ImageId"])
        zone = [{"Name": "availability-zone", "Values": [f"{region}a"]}]
        self.subnet = str(self.ec2.describe_subnets(Filters=zone)["Subnets"][0]["SubnetId"])

    def of(self, cluster: str, tagged: Mapping[str, str]) -> Maker:
        """Return the maker of one cluster's things."""
        return Maker(self, cluster, [{"Key": key, "Value": value} for key, value in tagged.items()])


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes things of one cluster."""

    hand: Hand
    cluster: str
    tags: list[dict[str, str]]

    def all(self) -> dict[str, str]:
        """Make one of each kind and return their ids by kind; nothing of it hangs on anything else of it."""
        return {
            "instance": self.instance(),
            "volume": self.volume(),
            "network-interface": self.interface(),
            "launch-template": self.template(),
            "security-group": self.firewall(),
            "key-pair": self.key(),
            "placement-group": self.placement(),
            "auto-scaling-group": self.group(),
            "role": self.role(),
            "instance-profile": self.profile(),
        }

    def instance(self) -> str:
        """Return a machine's id; its disk and its interface have no tags of their own."""
        started = self.hand.ec2.run_instances(
            ImageId=self.hand.image,
            InstanceType="g4dn.xlarge",
            MinCount=1,
            MaxCount=1,
            MetadataOptions={"HttpTokens": "required"},
            TagSpecifications=self._at_birth("instance"),
        )
        return str(started["Instances"][0]["InstanceId"])

    def volume(self) -> str:
        """Return a disk's id."""
        zone = f"{self.hand.region}a"
        return str(self.hand.ec2.create_volume(AvailabilityZone=zone, Size=8, **self._tagged("volume"))["VolumeId"])

    def interface(self) -> str:
        """Return the id of a network interface that nothing uses."""
        made = self.hand.ec2.create_network_interface(SubnetId=self.hand.subnet, **self._tagged("network-interface"))
        return str(made["NetworkInterface"]["NetworkInterfaceId"])

    def template(self) -> str:
        """Return a launch template's name, as Terraform would give it."""
        name = f"{self.cluster}-efa0"
        data = {"ImageId": self.hand.image, "InstanceType": "g4dn.xlarge"}
        self.hand.ec2.create_launch_template(
            LaunchTemplateName=name, LaunchTemplateData=data, **self._tagged("launch-template")
        )
        return name

    def firewall(self) -> str:
        """Return a security group's id."""
        name = f"{self.cluster}-ssh"
        made = self.hand.ec2.create_security_group(GroupName=name, Description=name, **self._tagged("security-group"))
        return str(made["GroupId"])

    def key(self) -> str:
        """Return a key pair's name."""
        self.hand.ec2.create_key_pair(KeyName=self.cluster, **self._tagged("key-pair"))
        return self.cluster

    def placement(self) -> str:
        """Return a placement group's name."""
        self.hand.ec2.create_placement_group(
            GroupName=self.cluster, Strategy="cluster", **self._tagged("placement-group")
        )
        return self.cluster

    def group(self) -> str:
        """Return an empty Auto Scaling group's name; the template must be there."""
        own = {"PropagateAtLaunch": False, "ResourceId": self.cluster, "ResourceType": "auto-scaling-group"}
        self.hand.scaling.create_auto_scaling_group(
            AutoScalingGroupName=self.cluster,
            MinSize=0,
            MaxSize=0,
            DesiredCapacity=0,
            VPCZoneIdentifier=self.hand.subnet,
            LaunchTemplate={"LaunchTemplateName": f"{self.cluster}-efa0", "Version": "$Latest"},
            Tags=[{**tag, **own} for tag in self.tags],
        )
        return self.cluster

    def role(self) -> str:
        """Return a role's name."""
        name = f"{self.cluster}-{self.hand.region}"
        self.hand.iam.create_role(RoleName=name, AssumeRolePolicyDocument=ANYONE, Tags=self.tags)
        return name

    def profile(self) -> str:
        """Return an instance profile's name; no role is in it."""
        name = f"{self.cluster}-{self.hand.region}"
        self.hand.iam.create_instance_profile(InstanceProfileName=name, Tags=self.tags)
        return name

    def _tagged(self, kind: str) -> dict[str, Any]:
        return {"TagSpecifications": self._at_birth(kind)}

    def _at_birth(self, kind: str) -> list[dict[str, Any]]:
        return [{"ResourceType": kind, "Tags": self.tags}] if self.tags else []
