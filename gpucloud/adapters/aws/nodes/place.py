"""Where a node group is: the names of what Terraform made for it."""

from __future__ import annotations

from dataclasses import dataclass

from gpucloud.domain.errors import ProvisionError

CLUSTER_TAG = "gpucloud:cluster"
DETACHED_TAG = "gpucloud:detached"
SUBNETS_TAG = "gpucloud:subnets"
SHUT_OFF = "gpucloud-shut-off"


def drill_role(region: str) -> str:
    """Return the name of the role for drills, a part of the region's base.

    IAM lists roles without their tags: those of a cluster are known by name, `gpucloud-<job>-<region>`. No job's name
    has a dot, so that a job called `drill` finds, takes over and removes its own role only.
    """
    return f"gpucloud-base.drill-{region}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A group's region and cluster; the cluster's name is the Auto Scaling group's and the instances' tag."""

    region: str
    cluster: str

    @classmethod
    def of(cls, group: str) -> Place:
        """Return the place of `<region>/<cluster>`. ProvisionError for any other form."""
        region, slash, cluster = group.partition("/")
        if not (region and slash and cluster) or "/" in cluster:
            raise ProvisionError(f"{group} is no node group on AWS", hint="its name is <region>/<cluster>")
        return cls(region=region, cluster=cluster)

    def __str__(self) -> str:
        return f"{self.region}/{self.cluster}"

    def template(self, efa: int) -> str:
        """Return the name of the launch template for types with so many EFA interfaces."""
        return f"{self.cluster}-efa{efa}"

    def missing(self) -> ProvisionError:
        """Return the error for a group that is not there."""
        return ProvisionError(f"there is no node group {self}", hint="make the cluster first")
