"""The role of an instance's profile, with the session keys that its machine finds in the metadata service."""

from __future__ import annotations

from typing import Any

from moto.iam.models import iam_backends
from moto.sts.models import sts_backends

from tests.lab.aws.world import ACCOUNT


def role_of(instance: Any) -> Any:
    """Return machines.Role, None for an instance without a profile."""
    from tests.lab.aws import machines  # noqa: PLC0415 - only labs with machines need it

    role = _of(instance)
    if role is None:
        return None
    session = sts_backends[ACCOUNT]["aws"].assume_role(
        region_name=instance.region_name, role_session_name=instance.id, role_arn=role.arn, policy="", duration=21600,
        external_id="",
    )  # fmt: skip
    return machines.Role(
        name=role.name,
        role_id=role.id,
        arn=role.arn,
        access_key=session.access_key_id,
        secret_key=session.secret_access_key,
        token=session.session_token,
    )


def arn_of(instance: Any) -> str | None:
    """Return the ARN of an instance's role."""
    role = _of(instance)
    return None if role is None else str(role.arn)


def _of(instance: Any) -> Any:
    if not instance.iam_instance_profile:
        return None
    arn = instance.iam_instance_profile["Arn"]
    return next(one for one in iam_backends[ACCOUNT]["aws"].instance_profiles.values() if one.arn == arn).roles[0]
