"""The caller's AWS account: who calls, and what it may rent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import botocore.exceptions

from gpucloud.adapters.aws.account import quotas
from gpucloud.adapters.aws.faults import code_of, explained, known
from gpucloud.adapters.aws.prices.catalog import load
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.errors import ProvisionError, UsageError
from gpucloud.domain.market.catalog import Caller, Catalog, Headroom, QuotaRequest
from gpucloud.domain.node.node import Fault
from gpucloud.domain.offer import Offer


class AwsAccount:
    """Implements `Account`. Thread-safe."""

    def __init__(self, aws: Aws, *, catalog: Catalog | None = None) -> None:
        self._aws = aws
        self._quotas = quotas.Quotas(aws, catalog or load())

    def caller(self) -> Caller:
        """Return who the caller is, within 3 s; CredentialsError names the profile and region that were used."""
        return caller_of(self._aws)

    def headroom(self, offer: Offer) -> Headroom:
        """Return the quota that machines of this offer count against; what may not be read is None."""
        return self._quotas.headroom(offer)

    def ask_for_more(self, headroom: Headroom, vcpus: int) -> QuotaRequest:
        """Ask AWS to raise the quota to `vcpus`; an open request for as much is returned as it stands."""
        return quotas.ask_for_more(self._aws, headroom, vcpus)

    def requests(self, region: str) -> tuple[QuotaRequest, ...]:
        """Return the requests made in the region, the newest first."""
        return quotas.requests(self._aws, region)


# Who the caller is to AWS.


def caller_of(aws: Aws) -> Caller:
    """Return who the caller is; who is not known, or cannot reach AWS, hears it within 3 s.

    CredentialsError names the profile and the region that were used; ProvisionError when AWS does not answer.
    """
    region = aws.region
    where = f"{f'profile {aws.profile}' if aws.profile else 'no profile'}, region {region}"
    with explained(f"log in to AWS ({where})"):
        who = _ask(aws, region)
    return Caller(
        account=str(who["Account"]),
        arn=str(who["Arn"]),
        profile=aws.profile,
        region=region,
        partition=aws.partition,
    )


def account_of(aws: Aws) -> str:
    """Return the caller's account number."""
    return caller_of(aws).account


def role_id_of(aws: Aws) -> str | None:
    """Return the id of the role that the caller is a session of, as machines of a cluster are; None for others."""
    with explained("learn this machine's role from AWS"):
        who = aws.client("sts").get_caller_identity()  # with patience: nobody sits and waits for a machine
    role_id, _, session = str(who["UserId"]).partition(":")
    return role_id if session else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnProfile:
    """An instance profile of the user's own: its ARN, and its role's ARN and id."""

    arn: str
    role_arn: str
    role_id: str


def profile_of(aws: Aws, name: str) -> OwnProfile:
    """Return what IAM says of an instance profile. UsageError: it is not there, or has no role."""
    try:
        with aws.calling("iam", f"read the instance profile {name}") as iam:
            found = iam.get_instance_profile(InstanceProfileName=name)["InstanceProfile"]
    except ProvisionError as error:
        if "NoSuchEntity" not in error.message:
            raise
        raise UsageError(
            f"aws: instance_profile: {name} is not in this account", hint="aws iam list-instance-profiles lists them"
        ) from error
    if not found["Roles"]:
        raise UsageError(
            f"aws: instance_profile: {name} has no role",
            hint=f"aws iam add-role-to-instance-profile --instance-profile-name {name} --role-name …",
        )
    role = found["Roles"][0]
    return OwnProfile(arn=str(found["Arn"]), role_arn=str(role["Arn"]), role_id=str(role["RoleId"]))


def boundary_of_role(aws: Aws, name: str) -> str | None:
    """Return the ARN of the boundary that a role stands under; None without one, or without the role."""
    client = aws.client("iam")
    with explained(f"read the role {name}"):
        try:
            role = client.get_role(RoleName=name)["Role"]
        except botocore.exceptions.ClientError as error:
            if code_of(error) == "NoSuchEntity":
                return None
            raise
    bound = role.get("PermissionsBoundary", {}).get("PermissionsBoundaryArn")
    return str(bound) if bound else None


def boundary_of(aws: Aws, arn: str) -> str | None:
    """Return the boundary's ARN if the policy stands; None where there is none, or the caller may not look."""
    client = aws.client("iam")
    with explained(f"look for {arn}"):
        try:
            client.get_policy(PolicyArn=arn)
        except botocore.exceptions.ClientError as error:
            if code_of(error) in {"NoSuchEntity", "AccessDenied", "AccessDeniedException"}:
                return None
            raise
    return arn


def _ask(aws: Aws, region: str) -> dict[str, Any]:
    """Ask once, in time; when AWS answers that it is busy it is there, and asked again with patience."""
    try:
        return dict(aws.client("sts", region, quick=True).get_caller_identity())
    except botocore.exceptions.ClientError as error:
        if known(code_of(error)).fault not in (Fault.THROTTLING, Fault.TRANSIENT):
            raise
    return dict(aws.client("sts", region).get_caller_identity())
