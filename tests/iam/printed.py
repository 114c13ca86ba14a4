"""An emulated account as `gpucloud iam policy` would have it: its boundary made, the caller under what it prints."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from gpucloud.adapters.aws.policy import BOUNDARY, boundary_arn, boundary_policy, user_policy
from gpucloud.adapters.aws.statements import Uses
from tests.lab.aws import Lab
from tests.lab.aws.world import ACCOUNT, REGION


def let_as_printed(lab: Lab, *, regions: tuple[str, ...] = (REGION,), uses: Uses | None = None, **more: Any) -> None:
    """Make the boundary in the account, and judge gpucloud's own calls by the printed policies from now on."""
    who: dict[str, Any] = {"partition": "aws", "account": ACCOUNT, "regions": regions, "uses": uses}
    iam = lab.client("iam")
    with contextlib.suppress(iam.exceptions.EntityAlreadyExistsException):
        iam.create_policy(PolicyName=BOUNDARY, PolicyDocument=json.dumps(boundary_policy(**who)))
    lab.let_caller(user_policy(**who, boundary=boundary_arn("aws", ACCOUNT), **more).values())
