"""The caller's AWS account: who calls, what EC2's quotas let him rent, what of that is in use, and asking for more."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import botocore.exceptions

from gpucloud.adapters.aws.faults import code_of, explained, known
from gpucloud.adapters.aws.prices.catalog import load
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.errors import ProvisionError, UsageError
from gpucloud.domain.job.spec import Market
from gpucloud.domain.market.catalog import Caller, Catalog, Headroom, QuotaRequest
from gpucloud.domain.node.node import Fault
from gpucloud.domain.offer import Offer

# The caller's AWS account: who calls, and what it may rent.


class AwsAccount:
    """Implements `Account`. Thread-safe."""

    def __init__(self, aws: Aws, *, catalog: Catalog | None = None) -> None:
        self._aws = aws
        self._quotas = Quotas(aws, catalog or load())

    def caller(self) -> Caller:
        """Return who the caller is, within 3 s; CredentialsError names the profile and region that were used."""
        return caller_of(self._aws)

    def headroom(self, offer: Offer) -> Headroom:
        """Return the quota that machines of this offer count against; what may not be read is None."""
        return self._quotas.headroom(offer)

    def ask_for_more(self, headroom: Headroom, vcpus: int) -> QuotaRequest:
        """Ask AWS to raise the quota to `vcpus`; an open request for as much is returned as it stands."""
        return ask_for_more(self._aws, headroom, vcpus)

    def requests(self, region: str) -> tuple[QuotaRequest, ...]:
        """Return the requests made in the region, the newest first."""
        return requests(self._aws, region)


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


# EC2's quotas: which one a machine counts against, how high it is, what of it is in use, and asking for more.


_CODES: dict[tuple[str, Market | None], tuple[str, str]] = {
    ("g", Market.SPOT): ("L-3819A6DF", "All G and VT Spot Instance Requests"),
    ("g", Market.ON_DEMAND): ("L-DB2E81BA", "Running On-Demand G and VT instances"),
    ("p", Market.SPOT): ("L-7212CCBC", "All P4, P3 and P2 Spot Instance Requests"),
    ("p", Market.ON_DEMAND): ("L-417A185B", "Running On-Demand P instances"),
    ("p5", Market.SPOT): ("L-C4BD4855", "All P5 Spot Instance Requests"),
    ("p5", Market.ON_DEMAND): ("L-417A185B", "Running On-Demand P instances"),
    ("p6", Market.ON_DEMAND): ("L-417A185B", "Running On-Demand P instances"),
    ("standard", Market.SPOT): ("L-34B43A08", "All Standard Spot Instance Requests"),
    ("standard", Market.ON_DEMAND): ("L-1216C47A", "Running On-Demand Standard instances"),
}
_Kind = tuple[str, Market | None]
_NONE = ("", "a quota whose code is not known")
_OPEN = {"PENDING", "CASE_OPENED"}
_FRESH_S = 30.0


def family_of(instance_type: str) -> str:
    """Return the family whose quota the type counts against: `g`, `p`, `p5`, `p6`, `standard`, else its letters."""
    letters = (re.match(r"[a-z]+", instance_type) or [""])[0]
    if letters in {"g", "gr", "vt"}:
        return "g"
    if letters == "p":
        generation = instance_type[1:2]
        return f"p{generation}" if generation >= "5" else "p"
    own = {"inf", "trn", "dl", "hpc", "mac"}
    return "standard" if letters[:1] in set("acdhimrtz") and letters not in own else letters


class Quotas:
    """Limits and use by region, remembered for half a minute: a plan asks for many offers at once."""

    def __init__(self, aws: Aws, catalog: Catalog, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._aws = aws
        self._catalog = catalog
        self._monotonic = monotonic
        self._known: dict[tuple[str, str], tuple[float, Any]] = {}
        self._lock = threading.Lock()

    def headroom(self, offer: Offer) -> Headroom:
        """Return the quota of the offer's machines; what the caller may not read is None. CredentialsError."""
        pool = offer.pool
        wanted: _Kind = (family_of(pool.instance_type), pool.market)
        code, name = self._quota(pool.region, wanted)
        limit = self._once(pool.region, code, lambda: self._limit(pool.region, code)) if code else None
        machines = self._once(pool.region, "machines", lambda: self._machines(pool.region)) if code else None
        alike = {kind for kind in [wanted, *_CODES] if kind == wanted or _CODES[kind][0] == code}
        used = None if machines is None else sum(vcpus for kind, vcpus in machines if kind in alike)
        return Headroom(region=pool.region, code=code, name=name, limit=limit, used=used)

    def _quota(self, region: str, kind: _Kind) -> tuple[str, str]:
        """Return the code and name of the quota for a family and market; AWS is asked by name for what is not known."""
        family, market = kind
        if kind in _CODES or market is None:
            return _CODES.get(kind, _NONE)
        listed = self._once(region, "quotas", lambda: self._listed(region)) or []
        found = {name: code for code, name in listed if family.upper() in _families(name, market)}
        found = found or {name: code for code, name in listed if family[:1].upper() in _families(name, market)}
        name = min(found, default=None)
        return (found[name], name) if name is not None else _NONE

    def _listed(self, region: str) -> list[tuple[str, str]]:
        with self._aws.calling("service-quotas", f"list the quotas of EC2 in {region}", region) as quotas:
            pages = quotas.get_paginator("list_service_quotas").paginate(ServiceCode="ec2")
            return [(str(one["QuotaCode"]), str(one["QuotaName"])) for page in pages for one in page["Quotas"]]

    def _once(self, region: str, what: str, ask: Callable[[], Any]) -> Any:
        with self._lock:
            at, answer = self._known.get((region, what), (float("-inf"), None))
            if self._monotonic() - at < _FRESH_S:
                return answer
            try:
                answer = ask()
            except ProvisionError:
                answer = None
            self._known[region, what] = (self._monotonic(), answer)
            return answer

    def _limit(self, region: str, code: str) -> int:
        with self._aws.calling("service-quotas", f"read the quota {code} in {region}", region) as quotas:
            try:
                quota = quotas.get_service_quota(ServiceCode="ec2", QuotaCode=code)["Quota"]
            except botocore.exceptions.ClientError as error:
                # A quota that was never changed may have no value of the account's own.
                if code_of(error) != "NoSuchResourceException":
                    raise
                quota = quotas.get_aws_default_service_quota(ServiceCode="ec2", QuotaCode=code)["Quota"]
        return int(quota["Value"])

    def _machines(self, region: str) -> list[tuple[_Kind, int]]:
        """Return each machine that counts, as its family and market and its vCPUs."""
        alive = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
        with self._aws.calling("ec2", f"list the machines in {region}", region) as ec2:
            pages = ec2.get_paginator("describe_instances").paginate(Filters=alive)
            found = [machine for page in pages for group in page["Reservations"] for machine in group["Instances"]]
        return [(_kind_of(machine), self._vcpus(machine)) for machine in found]

    def _vcpus(self, machine: dict[str, Any]) -> int:
        listed = self._catalog.machines.get(str(machine["InstanceType"]))
        if listed:
            return listed.vcpus
        options = machine.get("CpuOptions", {})
        return int(options.get("CoreCount", 0)) * int(options.get("ThreadsPerCore", 1))


def ask_for_more(aws: Aws, headroom: Headroom, vcpus: int) -> QuotaRequest:
    """Ask AWS for the quota, unless as much is asked for already. UsageError: the quota is as high, or not known."""
    region, code = headroom.region, headroom.code
    if not code:
        raise UsageError(
            "the code of this machine family's quota is not known",
            hint=f"https://{region}.console.aws.amazon.com/servicequotas/home/services/ec2/quotas",
        )
    if headroom.limit is not None and headroom.limit >= vcpus:
        raise UsageError(
            f"the quota {headroom.name!r} in {region} is {headroom.limit} vCPUs already",
            hint=f"ask for more than {headroom.limit}, or end machines that use it",
        )
    with aws.calling("service-quotas", f"ask for {vcpus} vCPUs of {headroom.name!r} in {region}", region) as quotas:
        pages = quotas.get_paginator("list_requested_service_quota_change_history_by_quota").paginate(
            ServiceCode="ec2", QuotaCode=code
        )
        for asked in (asked for page in pages for asked in page["RequestedQuotas"]):
            if asked["Status"] in _OPEN and asked["DesiredValue"] >= vcpus:
                return _request(region, asked)
        reply = quotas.request_service_quota_increase(ServiceCode="ec2", QuotaCode=code, DesiredValue=float(vcpus))
    return _request(region, reply["RequestedQuota"])


def requests(aws: Aws, region: str) -> tuple[QuotaRequest, ...]:
    """Return the requests for EC2's quotas in the region, the newest first."""
    with aws.calling("service-quotas", f"list the quota requests in {region}", region) as quotas:
        pages = quotas.get_paginator("list_requested_service_quota_change_history").paginate(ServiceCode="ec2")
        found = [_request(region, asked) for page in pages for asked in page["RequestedQuotas"]]
    return tuple(sorted(found, key=lambda request: request.asked_at, reverse=True))


def _families(name: str, market: Market) -> set[str]:
    """Return the families that a quota's name lists: P4, P3 and P2 of `All P4, P3 and P2 Spot Instance Requests`."""
    spot, on_demand = r"All (.+) Spot Instance Requests", r"Running On-Demand (.+) instances"
    told = re.fullmatch(spot if market is Market.SPOT else on_demand, name)
    return set(re.findall(r"\b[A-Z][A-Za-z]{0,2}\d*\b", told[1])) if told else set()


def _kind_of(machine: dict[str, Any]) -> _Kind:
    # "capacity-block" and "scheduled" machines were paid for beforehand and count against neither.
    markets = {"spot": Market.SPOT, "": Market.ON_DEMAND}
    market = markets.get(str(machine.get("InstanceLifecycle", "")))
    return family_of(str(machine["InstanceType"])), market


def _request(region: str, asked: dict[str, Any]) -> QuotaRequest:
    created: datetime = asked["Created"]
    return QuotaRequest(
        region=region,
        code=str(asked["QuotaCode"]),
        name=str(asked.get("QuotaName", asked["QuotaCode"])),
        wanted=int(asked["DesiredValue"]),
        status=str(asked["Status"]),
        asked_at=created.astimezone(timezone.utc),
    )
