"""Where a node group is: the names of what Terraform made for it, and of what tells about it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta

from gpucloud.domain.errors import ProvisionError
from gpucloud.domain.job.spec import Market
from gpucloud.domain.offer import EfaLayout

CLUSTER_TAG = "gpucloud:cluster"
RELIEVED_TAG = "gpucloud:relieved"
SUBNETS_TAG = "gpucloud:subnets"
SSH_TAG = "gpucloud:ssh"
SHUT_OFF = "gpucloud-shut-off"
SHUT_OFF_AGAIN = "gpucloud-shut-off-again"
LEAST_AHEAD = timedelta(seconds=120)
"""AWS runs a scheduled action up to two minutes late: what is started with less ahead may be up after it has fired."""


_STARTED_BY = re.compile(r"-efa[0-9a-z]+\.(?P<type>[a-z0-9-]+\.[a-z0-9-]+)\.(?P<market>spot|on_demand)$")


def started_by(template: str) -> tuple[str, Market] | None:
    """Return the type and the market of a template that `Place.template_of` named; None for any other name."""
    found = _STARTED_BY.search(template)
    return (found["type"], Market(found["market"])) if found else None


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

    def template(self, efa: EfaLayout) -> str:
        """Return the name of the launch template that Terraform makes for types whose EFA interfaces lie so."""
        return f"{self.cluster}-efa{efa}"

    def template_of(self, efa: EfaLayout, instance_type: str, market: Market) -> str:
        """Return the name of the launch template that starts machines of a type, paid so; `started_by` reads it."""
        return f"{self.template(efa)}.{instance_type}.{market.value}"

    def missing(self) -> ProvisionError:
        """Return the error for a group that is not there."""
        return ProvisionError(f"there is no node group {self}", hint="make the cluster first")
