"""Who the caller is to AWS."""

from __future__ import annotations

from typing import Any

import botocore.exceptions

from gpucloud.adapters.aws.faults import code_of, explained, known
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.account import Caller
from gpucloud.domain.node import Fault


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


def _ask(aws: Aws, region: str) -> dict[str, Any]:
    """Ask once, in time; when AWS answers that it is busy it is there, and asked again with patience."""
    try:
        return dict(aws.client("sts", region, quick=True).get_caller_identity())
    except botocore.exceptions.ClientError as error:
        if known(code_of(error)).fault not in (Fault.THROTTLING, Fault.TRANSIENT):
            raise
    return dict(aws.client("sts", region).get_caller_identity())
