"""The IAM policies that `gpucloud iam policy` prints: of the caller's account, of one that is named, or of none yet."""

from __future__ import annotations

import os
import re
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gpucloud.adapters.aws.account import account_of, profile_of
from gpucloud.adapters.aws.bucket import bucket_name
from gpucloud.adapters.aws.policy import boundary_arn, boundary_policy, node_policy, user_policy
from gpucloud.adapters.aws.session import Aws, partition_of
from gpucloud.adapters.aws.statements import Uses
from gpucloud.domain.errors import CredentialsError, ProvisionError, UsageError
from gpucloud.domain.job.spec import Access, AwsChoices, Job, Resources

if TYPE_CHECKING:
    from collections.abc import Callable


# In angle brackets: a number that looks like an account's would be pasted as it stands; this names nothing that exists.
ACCOUNT, REGION, ROLE = "<ACCOUNT>", "<REGION>", "<ROLE>"
_ANY_REGION = "us-east-1"  # where AWS is asked who the caller is while no region is known


class PrintedPolicies:
    """The policies for one job's choices. AWS is asked at most for what only it knows; `remarks` says what is lacking.

    `account` and `region` are those that were named: with an account nothing is asked of AWS. `without_address` tells
    the types that the job may get and that AWS gives no public address.
    """

    def __init__(
        self,
        choices: AwsChoices,
        resources: Resources,
        *,
        without_address: Callable[[], tuple[str, ...]],
        account: str | None = None,
        region: str | None = None,
    ) -> None:
        if account is not None and not re.fullmatch(r"[0-9]{12}", account):
            raise UsageError(
                f"--account {account} is no AWS account number, which has 12 digits",
                hint="aws sts get-caller-identity --query Account prints yours",
            )
        self._choices = choices
        self._named = (region,) if region is not None else resources.regions
        self._asked_for = account
        self._without_address = without_address
        self.remarks: list[str] = []

    def of_caller(
        self, job: Job | None, *, bounded: bool = True, makes_roles: bool = True, kms_keys: tuple[str, ...] = ()
    ) -> dict[str, dict[str, Any]]:
        """Return the least IAM policies of whoever runs gpucloud, by name: for one job's region and store, if given.

        Not `bounded`: roles may be made without a boundary. Not `makes_roles`: no role can be made at all.
        """

        return user_policy(
            partition=self._partition,
            account=self._account,
            region=self._region_of(job),
            uses=self._uses(job, kms_keys),
            boundary=self._boundary if bounded else None,
            makes_roles=makes_roles and self._choices.instance_profile is None,
        )

    def boundary(self, job: Job | None, kms_keys: tuple[str, ...] = ()) -> dict[str, Any]:
        """Return the most that roles of gpucloud's making may do: a policy to be made once, as `boundary_name`."""

        return boundary_policy(
            partition=self._partition,
            account=self._account,
            region=self._region_of(job),
            uses=self._uses(job, kms_keys),
        )

    def of_machines(
        self, job: Job, cluster: str, *, unattended: bool = False, kms_keys: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """Return the least IAM policy of the job's machines, which drive it if it is `unattended`."""

        region = self._first_region or self._lacking(REGION, "--region us-east-1 puts the region in")
        store = urlsplit(job.store) if job.store else None
        return node_policy(
            partition=self._partition,
            account=self._account,
            region=region,
            cluster=cluster,
            bucket=store.netloc if store else bucket_name(self._account, region),
            prefix=store.path if store else "",
            data=in_s3(job),
            kms_keys=self._keys(kms_keys),
            unattended=unattended,
            session_manager=self._by_session_manager,
        )

    @property
    def _by_session_manager(self) -> bool:
        """Whether a machine of the job may be one that is reached so: it says so, or AWS gives the type no address."""
        if self._choices.access is not Access.PUBLIC:
            return self._choices.access is Access.SESSION_MANAGER
        types = self._without_address()
        if types:
            shown = f"{types[0]} has" if len(types) == 1 else f"{types[0]} and {len(types) - 1} more have"
            self.remarks.append(f"{shown} no public address: the channels of Session Manager are for those machines")
        return bool(types)

    @property
    def boundary_name(self) -> str:
        """What the policy of the boundary must be called."""
        return self._boundary.rpartition(":policy/")[2]

    @property
    def _boundary(self) -> str:

        return self._choices.permissions_boundary or boundary_arn(self._partition, self._account)

    @cached_property
    def _aws(self) -> Aws:

        return Aws(self._choices.profile, self._named[0] if self._named else None)

    @cached_property
    def _first_region(self) -> str | None:
        """The region that was named, else the job's first, else the profile's or AWS_REGION."""
        if self._named:
            return self._named[0]
        try:
            return self._aws.region
        except CredentialsError:  # a profile that this machine does not have
            return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        except UsageError:
            return None

    def _region_of(self, job: Job | None) -> str | None:
        """Return the region that the policies are limited to; None: every region."""
        return self._first_region if self._named or job is not None else None

    @cached_property
    def _partition(self) -> str:

        return partition_of(self._first_region or _ANY_REGION)

    @cached_property
    def _account(self) -> str:
        if self._asked_for is not None:
            return self._asked_for

        try:
            return account_of(Aws(self._choices.profile, self._first_region or _ANY_REGION))
        except (CredentialsError, ProvisionError) as error:
            why = error.message.partition("\n")[0]
            return self._lacking(ACCOUNT, f"--account 123456789012 puts your account's number in ({why})")

    def _lacking(self, placeholder: str, how: str) -> str:
        """Return the placeholder, and have it said once that it stands there."""
        remark = f"{placeholder} is a placeholder: {how}"
        if remark not in self.remarks:
            self.remarks.append(remark)
        return placeholder

    @property
    def _knows_the_account(self) -> bool:
        return self._asked_for is None and self._account != ACCOUNT

    def _uses(self, job: Job | None, kms_keys: tuple[str, ...]) -> Uses:

        choices = self._choices
        profile, role = self._own_profile(choices.instance_profile) if choices.instance_profile else (None, None)
        return Uses(
            stores=(urlsplit(job.store).netloc,) if job is not None and job.store is not None else (),
            data=tuple(urlsplit(source).netloc for source in in_s3(job)),
            subnets=choices.subnets,
            capacity=tuple(filter(None, (choices.capacity_reservation, choices.capacity_block))),
            kms_keys=self._keys(kms_keys),
            instance_profile=profile,
            instance_role=role,
        )

    def _keys(self, named: tuple[str, ...]) -> tuple[str, ...]:
        """Return the job's own KMS key and those that were named beside it."""
        return tuple(dict.fromkeys((*filter(None, (self._choices.kms_key,)), *named)))

    def _own_profile(self, name: str) -> tuple[str, str]:
        """Return the ARNs of the user's own profile and of its role, which only IAM knows."""
        if self._knows_the_account:
            own = profile_of(self._aws, name)
            return own.arn, own.role_arn
        iam = f"arn:{self._partition}:iam::{self._account}"
        role = self._lacking(ROLE, f"put in the role of the instance profile {name}, with its path if it has one")
        return f"{iam}:instance-profile/{name}", f"{iam}:role/{role}"


def in_s3(job: Job | None) -> tuple[str, ...]:
    """Return the job's data that lie in buckets, as `s3://bucket/prefix`."""
    return tuple(source for source, _ in job.data if source.startswith("s3://")) if job is not None else ()
