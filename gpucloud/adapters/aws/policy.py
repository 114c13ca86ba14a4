"""The least that IAM must allow: the caller's policies, the boundary of the roles it makes, and a machine's policy.

What is made must carry gpucloud's tag from birth, and only what carries it may be changed or deleted. Roles are made
under a boundary only: whoever may make a role without one may make himself an administrator. Policies are split
because one managed policy holds 6,144 characters. `gpucloud iam policy` prints them for the caller's account, for one
that is named, or for none yet.
"""

from __future__ import annotations

import os
import re
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gpucloud.adapters.aws import statements
from gpucloud.adapters.aws.account import account_of, profile_of
from gpucloud.adapters.aws.bucket import bucket_name
from gpucloud.adapters.aws.session import Aws, partition_of
from gpucloud.adapters.aws.statements import OURS, Document, Names, Uses, allow, document, statement
from gpucloud.domain.errors import CredentialsError, ProvisionError, UsageError
from gpucloud.domain.job.spec import Access, AwsChoices, Job, Resources

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

BOUNDARY = "gpucloud-boundary"
"""The boundary's name, which gpucloud looks for in an account whose job file names none."""

# In angle brackets: a number that looks like an account's would be pasted as it stands; this names nothing that exists.
ACCOUNT, REGION, ROLE = "<ACCOUNT>", "<REGION>", "<ROLE>"
_ANY_REGION = "us-east-1"  # where AWS is asked who the caller is while no region is known


def boundary_arn(partition: str, account: str) -> str:
    """Return the ARN of the account's boundary for roles that gpucloud makes."""
    return f"arn:{partition}:iam::{account}:policy/{BOUNDARY}"


def user_policy(
    *,
    partition: str,
    account: str,
    regions: tuple[str, ...] = (),
    uses: Uses | None = None,
    boundary: str | None = None,
    makes_roles: bool = True,
) -> dict[str, Document]:
    """Return what whoever runs gpucloud needs, a document by name; no `regions`: in every region.

    Roles can be made under the `boundary` (an ARN) only; with None under none, which makes the holder an
    administrator. Not `makes_roles`: machines then have an instance profile of the user's own.
    """
    names, uses = Names(partition=partition, account=account, regions=regions), uses or Uses()
    own_role = [uses.instance_role] if uses.instance_role else []
    by_name = {
        "gpucloud-read": [*statements.reads(names), *statements.reads_of_roles(uses, boundary)],
        "gpucloud-network": statements.network(names, uses),
        "gpucloud-machines": statements.machines(names, uses),
        "gpucloud-account": [
            *(statements.roles(names, boundary) if makes_roles else statements.seen_roles(names)),
            *statements.passed(names, own_role, makes_roles=makes_roles),
            *statements.buckets(names, uses.stores),
            *statements.data(names, uses.data),
            *statements.keys(names, uses.kms_keys),
            *statements.drills(names),
        ],
    }
    return {
        part: policy
        for name, every in by_name.items()
        for part, policy in statements.pieces(name, document(names, every)).items()
    }


def boundary_policy(
    *, partition: str, account: str, regions: tuple[str, ...] = (), uses: Uses | None = None
) -> Document:
    """Return the most that any role of gpucloud's making can do, whatever its policy says; no `regions`: in any.

    It is as much as machines of all jobs, and the role for drills, need; and no more than who makes such roles may
    himself, but for reading data sets and sending a machine of gpucloud its interruption. Of buckets of gpucloud's own
    machines use that of the first region.
    """
    names, uses = Names(partition=partition, account=account, regions=regions), uses or Uses()
    own = f"arn:{partition}:s3:::{bucket_name(account, names.each[0])}"
    buckets = [own, *(f"arn:{partition}:s3:::{store}" for store in uses.stores)]
    sets = [f"arn:{partition}:s3:::{bucket}/*" for bucket in dict.fromkeys(uses.data)]
    written = [f"*jobs/*/{name}" for name in (*statements.WRITTEN, *statements.WRITTEN_DRIVING)]
    drives = [f"autoscaling:{name}" for name in statements.READS["autoscaling"].split()]
    group = [names.of("autoscaling", "autoScalingGroup:*:autoScalingGroupName/gpucloud-*")]
    ours = [f"autoscaling:{name}" for name in ("SetDesiredCapacity", "TerminateInstanceInAutoScalingGroup")]
    ours.append("ec2:SendSpotInstanceInterruptions")
    return document(
        names,
        [
            allow("List", "s3", "ListBucket", buckets),
            allow("Read", "s3", "GetObject", [*(f"{bucket}/*" for bucket in buckets), *sets]),
            # Never what the user's side alone says: `control/`, and what clusters are told.
            allow(
                "Write", "s3", "AbortMultipartUpload DeleteObject PutObject",
                [f"{bucket}/{path}" for bucket in buckets for path in (*written, "*clusters/*/hosts/*")],
            ),
            # A pattern's star passes slashes: `jobs/*/ledger/*` would be `jobs/x/control/ledger/*` too.
            {
                **allow(
                    "NotOrders",
                    "s3",
                    "AbortMultipartUpload DeleteObject PutObject",
                    [f"{bucket}/*jobs/*/control/ledger/*" for bucket in buckets],
                ),
                "Effect": "Deny",
            },
            # In one statement, as it names the regions: a boundary cannot be split.
            statement("Ours", ours, [*group, *names.ec2("instance")], OURS),
            statement("Look", [*drives, "ec2:DescribeInstances", "ec2:DescribeSpotPriceHistory"], ["*"], {}),
            *statements.sessions(),
            *statements.keys(names, uses.kms_keys, grants=False),
        ],
    )  # fmt: skip


def node_policy(  # noqa: PLR0913  each by its name
    *,
    partition: str,
    account: str,
    regions: tuple[str, ...],
    cluster: str,
    bucket: str,
    prefix: str = "",
    data: tuple[str, ...] = (),
    kms_keys: tuple[str, ...] = (),
    unattended: bool = False,
    session_manager: bool = False,
) -> Document:
    """Return what a machine of the cluster needs: its job's objects and data, its own host key, its own group's level.

    `data` are `s3://bucket/prefix`: each may be read, as one object or a folder of them. It reads all of its job, and
    writes checkpoints, outputs and its status. Of an `unattended` job, which drives itself, a machine also writes the
    job's state and its records, sees its own group and replaces a machine of it; never more of them, nor for longer,
    and never what the user's side alone says (`control/`). `session_manager`: it is reached through AWS's agent.
    It is what `terraform/aws/cluster` gives the role that it makes, of one region each; for who brings an instance
    profile of their own, which is of all regions.
    """
    store = f"arn:{partition}:s3:::{bucket}"
    below = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
    job = f"{below}jobs/{cluster.removeprefix('gpucloud-')}"
    place = f"{store}/{below}clusters/{cluster}"
    names = Names(partition=partition, account=account, regions=regions)
    group = names.of("autoscaling", f"autoScalingGroup:*:autoScalingGroupName/{cluster}")
    ours = {"StringEquals": {"aws:ResourceTag/gpucloud:cluster": cluster}}
    written = [*statements.WRITTEN, *(statements.WRITTEN_DRIVING if unattended else ())]
    paths = [source.removeprefix("s3://").rstrip("/") for source in data]
    read = [
        f"arn:{partition}:s3:::{name}" for path in paths for name in (*([path] if "/" in path else []), f"{path}/*")
    ]
    return document(
        names,
        [
            allow("ListJob", "s3", "ListBucket", [store], {"StringLike": {"s3:prefix": f"{job}/*"}}),
            allow("ReadJob", "s3", "GetObject", [f"{store}/{job}/*"]),
            allow("WriteJob", "s3", "AbortMultipartUpload PutObject", [f"{store}/{job}/{name}" for name in written]),
            # What newer checkpoints stand for.
            allow("Prune", "s3", "DeleteObject", [f"{store}/{job}/checkpoints/*"]),
            # <role id>:<instance id>: no machine can write another one's key.
            allow("HostKey", "s3", "PutObject", [f"{place}/hosts/${{aws:userid}}"]),
            # What it must know and run to make itself fit; it cannot change what others read there.
            allow("Record", "s3", "GetObject", [f"{place}/{name}" for name in ("gpucloud-*.zip", "node.json")]),
            *([allow("Data", "s3", "GetObject", read)] if read else []),
            *([statements.store_keys(names, kms_keys)] if kms_keys else []),
            allow("Level", "autoscaling", "SetDesiredCapacity", [group], ours),
            *(statements.drive(names, place, group, ours) if unattended else []),
            *(statements.sessions() if session_manager else []),
        ],
    )


def actions(*documents: Document) -> frozenset[str]:
    """Return every action that the documents allow, as `service:Action`."""
    return frozenset(action for document in documents for one in document["Statement"] for action in one["Action"])


# What `gpucloud iam policy` prints of them.


class PrintedPolicies:
    """The policies for one job's choices. AWS is asked at most for what only it knows; `remarks` says what is lacking.

    `account` and `region` are those that were named: with an account nothing is asked of AWS. `without_address` tells
    the types that the job may get and that AWS gives no public address; `regions` are those that the catalog knows.
    """

    def __init__(
        self,
        choices: AwsChoices,
        resources: Resources,
        *,
        without_address: Callable[[], tuple[str, ...]],
        regions: Collection[str] = (),
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
        self._regions = regions
        self.remarks: list[str] = []

    def of_caller(
        self, job: Job | None, *, bounded: bool = True, makes_roles: bool = True, kms_keys: tuple[str, ...] = ()
    ) -> dict[str, dict[str, Any]]:
        """Return the least IAM policies of whoever runs gpucloud, by name: for one job's regions and store, if given.

        Not `bounded`: roles may be made without a boundary. Not `makes_roles`: no role can be made at all.
        """
        return user_policy(
            partition=self._partition,
            account=self._account,
            regions=self._regions_of(job),
            uses=self._uses(job, kms_keys),
            boundary=self._boundary if bounded else None,
            makes_roles=makes_roles and self._choices.instance_profile is None,
        )

    def boundary(self, job: Job | None, kms_keys: tuple[str, ...] = ()) -> dict[str, Any]:
        """Return the most that roles of gpucloud's making may do: a policy to be made once, as `boundary_name`.

        UsageError for one that is too long for AWS.
        """
        regions = self._regions_of(job)
        policy = boundary_policy(
            partition=self._partition, account=self._account, regions=regions, uses=self._uses(job, kms_keys)
        )
        if (long := statements.size(policy)) > statements.MOST:
            raise UsageError(
                f"the boundary has {long:,} characters, and AWS takes {statements.MOST:,} in one policy",
                hint="fewer `regions:` in the job file, or fewer --kms-key",
            )
        return policy

    def of_machines(
        self, job: Job, cluster: str, *, unattended: bool = False, kms_keys: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """Return the least IAM policy of the job's machines, which drive it if it is `unattended`."""
        regions = self._regions_of(job) or (self._lacking(REGION, "--region us-east-1 puts the region in"),)
        store = urlsplit(job.store) if job.store else None
        return node_policy(
            partition=self._partition,
            account=self._account,
            regions=regions,
            cluster=cluster,
            bucket=store.netloc if store else bucket_name(self._account, regions[0]),
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

    def _regions_of(self, job: Job | None) -> tuple[str, ...]:
        """Return the regions that the policies are limited to; none: every region."""
        return self._named or tuple(filter(None, (self._first_region if job is not None else None,)))

    @cached_property
    def _partition(self) -> str:
        return partition_of(self._first_region or _ANY_REGION, self._regions)

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
        self._remark(f"{placeholder} is a placeholder: {how}")
        return placeholder

    def _remark(self, text: str) -> None:
        """Have it said, once."""
        if text not in self.remarks:
            self.remarks.append(text)

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
