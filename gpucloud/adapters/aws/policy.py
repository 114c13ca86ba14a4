"""The least that IAM must allow: the caller's policies, the boundary of the roles it makes, and a machine's policy.

What is made must carry gpucloud's tag from birth, and only what carries it may be changed or deleted. Roles are made
under a boundary only: whoever may make a role without one may make himself an administrator. Policies are split
because one managed policy holds 6,144 characters.
"""

from __future__ import annotations

from gpucloud.adapters.aws import statements
from gpucloud.adapters.aws.statements import OURS, Document, Names, Uses, allow, document, statement

BOUNDARY = "gpucloud-boundary"
"""The boundary's name, which gpucloud looks for in an account whose job file names none."""


def boundary_arn(partition: str, account: str) -> str:
    """Return the ARN of the account's boundary for roles that gpucloud makes."""
    return f"arn:{partition}:iam::{account}:policy/{BOUNDARY}"


def user_policy(
    *,
    partition: str,
    account: str,
    region: str | None,
    uses: Uses | None = None,
    boundary: str | None = None,
    makes_roles: bool = True,
) -> dict[str, Document]:
    """Return what whoever runs gpucloud needs, a document by name; `region` None: in every region.

    Roles can be made under the `boundary` (an ARN) only; with None under none, which makes the holder an
    administrator. Not `makes_roles`: machines then have an instance profile of the user's own.
    """
    names, uses = Names(partition=partition, account=account, region=region or "*"), uses or Uses()
    own_role = [uses.instance_role] if uses.instance_role else []
    return {
        "gpucloud-read": document([*statements.reads(names, region), *statements.reads_of_roles(uses, boundary)]),
        "gpucloud-network": document(statements.network(names, uses)),
        "gpucloud-machines": document(statements.machines(names, uses)),
        "gpucloud-account": document(
            [
                *(statements.roles(names, boundary) if makes_roles else statements.seen_roles(names)),
                *statements.passed(names, own_role, makes_roles=makes_roles),
                *statements.buckets(names, uses.stores),
                *statements.data(names, uses.data),
                *statements.keys(names, uses.kms_keys),
                *statements.drills(names),
            ]
        ),
    }


def boundary_policy(*, partition: str, account: str, region: str | None, uses: Uses | None = None) -> Document:
    """Return the most that any role of gpucloud's making can do, whatever its policy says; `region` None: in any.

    It is as much as machines of all jobs, and the role for drills, need; and no more than who makes such roles may
    himself, but for reading data sets and sending a machine of gpucloud its interruption.
    """
    names, uses = Names(partition=partition, account=account, region=region or "*"), uses or Uses()
    own = f"arn:{partition}:s3:::gpucloud-{account}-{names.region}"
    buckets = [own, *(f"arn:{partition}:s3:::{store}" for store in uses.stores)]
    sets = [f"arn:{partition}:s3:::{bucket}/*" for bucket in dict.fromkeys(uses.data)]
    written = [f"*jobs/*/{name}" for name in (*statements.WRITTEN, *statements.WRITTEN_DRIVING)]
    drives = [f"autoscaling:{name}" for name in statements.READS["autoscaling"].split()]
    group = [names.of("autoscaling", "autoScalingGroup:*:autoScalingGroupName/gpucloud-*")]
    return document(
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
            allow("Group", "autoscaling", "SetDesiredCapacity TerminateInstanceInAutoScalingGroup", group, OURS),
            statement("Look", [*drives, "ec2:DescribeInstances", "ec2:DescribeSpotPriceHistory"], ["*"], {}),
            allow("Interrupt", "ec2", "SendSpotInstanceInterruptions", names.ec2("instance"), OURS),
            *statements.sessions(),
            *statements.keys(names, uses.kms_keys, grants=False),
        ]
    )  # fmt: skip


def node_policy(  # noqa: PLR0913  each by its name
    *,
    partition: str,
    account: str,
    region: str,
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
    It is what `terraform/aws/cluster` gives the role that it makes; for who brings an instance profile of their own.
    """
    store = f"arn:{partition}:s3:::{bucket}"
    below = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
    job = f"{below}jobs/{cluster.removeprefix('gpucloud-')}"
    place = f"{store}/{below}clusters/{cluster}"
    names = Names(partition=partition, account=account, region=region)
    group = names.of("autoscaling", f"autoScalingGroup:*:autoScalingGroupName/{cluster}")
    ours = {"StringEquals": {"aws:ResourceTag/gpucloud:cluster": cluster}}
    written = [*statements.WRITTEN, *(statements.WRITTEN_DRIVING if unattended else ())]
    paths = [source.removeprefix("s3://").rstrip("/") for source in data]
    read = [
        f"arn:{partition}:s3:::{name}" for path in paths for name in (*([path] if "/" in path else []), f"{path}/*")
    ]
    return document(
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
        ]
    )


def actions(*documents: Document) -> frozenset[str]:
    """Return every action that the documents allow, as `service:Action`."""
    return frozenset(action for document in documents for one in document["Statement"] for action in one["Action"])
