"""A machine is not its owner: what runs on one, with its role, changes no order, budget, wall or other job."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from itertools import chain
from pathlib import Path
from typing import Any

import boto3
import botocore.config
import botocore.exceptions
import pytest

from gpucloud.adapters.aws.bucket import ensure_bucket
from gpucloud.adapters.aws.nodes.group import AwsNodeGroup
from gpucloud.adapters.aws.policy import BOUNDARY, boundary_policy, node_policy
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain import codec
from gpucloud.domain.checkpoint.manifest import Commit, Manifest, Promise
from gpucloud.domain.errors import GpucloudError, StoreError
from gpucloud.domain.node.output import DatedPiece
from gpucloud.domain.state.state import JobStatus
from gpucloud.store import ObjectStore, open_store
from gpucloud.store.checkpoints import Checkpoints
from gpucloud.system.retries import SystemClock
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.jobstore.lease import take
from tests.lab.aws import Lab
from tests.lab.aws.world import ACCOUNT, REGION
from tests.prove.claims import Driven, verdicts
from tests.prove.goal import Figure, Form, Goal
from tests.standins.aws_group import CLUSTER, GROUP, SPOT, Rig, rented
from tests.unit.worlds import state

_BUCKET = f"gpucloud-{ACCOUNT}-{REGION}"
_JOB, _OTHER = "jobs/digits", "jobs/other"
_OWNERS = ("order.json", "spec.yaml", "code/0a", "data/0a", "armings/000001.json", "ledger/i-1.json", "billed.json")
_RECORDS = ("state.json", "ledger/i-1.json", "events/1.json", "logs/0001/rank-00000/0", "metrics/0001/i-1-0.jsonl.gz")
_PLACE = f"clusters/{CLUSTER}"
_TOLD = (f"{_PLACE}/node.json", f"{_PLACE}/drive.json", f"{_PLACE}/gpucloud-1.zip", f"{_PLACE}/hosts/AROAX:i-peer")
_GROUP = {"AutoScalingGroupName": CLUSTER}
Attack = tuple[str, Callable[[], Any]]


def run(form: Form) -> Iterator[Figure]:
    """Try every attack with the role of an attended machine and of one that drives; count what came of them."""
    del form
    tried = changed = barred = 0
    claimed: list[tuple[str, str, list[str]]] = []
    for drives in (False, True):
        with tempfile.TemporaryDirectory() as folder, rented(Path(folder)) as lab:
            _prepare(lab)
            role = _Role(lab, drives=drives)
            before = _owned(lab, drives=drives)
            for why, attack in role.attacks():
                tried += 1
                if _succeeds(attack):
                    print(f"boundary: {'driving' if drives else 'attended'}: {why} was allowed", file=sys.stderr)
            after = _owned(lab, drives=drives)
            for key in sorted(before.keys() | after.keys()):
                if before.get(key) != after.get(key):
                    changed += 1
                    print(f"boundary: {key}: {before.get(key)} -> {after.get(key)}", file=sys.stderr)
            for why, deed in chain(role.job(drives=drives), role.work(drives=drives)):
                if not _succeeds(deed):
                    barred += 1
                    print(f"boundary: {why} is refused, and the job needs it", file=sys.stderr)
            if drives and not role.sees_that_nothing_is_to_drive(lab):
                barred += 1
                print("boundary: a withdrawn order looks like one that may not be read", file=sys.stderr)
            if drives:
                claimed += _claimed(role)
    yield Figure(name="boundary", value=changed + barred, limit=0)
    yield Figure(name="boundary.attacks", value=tried, limit=80, least=True)
    for what in ("budget", "sum", "shut-off", "written"):
        worse = [(why, how) for why, kind, how in claimed if kind == what and how]
        for why, how in worse:
            print(f"boundary: {why}: {what}: {', '.join(how)}", file=sys.stderr)
        yield Figure(name=f"boundary.{what}", value=len(worse), limit=0)
    yield Figure(name="boundary.claims", value=len({why for why, _, _ in claimed}), limit=50, least=True)


def _claimed(role: _Role) -> list[tuple[str, str, list[str]]]:
    """Have the machines claim all that they may write of their job; return what is worse for it then."""
    return list(verdicts(Driven(role.store())))


def _prepare(lab: Lab) -> None:
    """A job under way, another one beside it, and a group with two machines behind its shut-off."""
    ensure_bucket(Aws(region=REGION), REGION)
    s3 = lab.client("s3")
    mine = [*(f"{_JOB}/control/{name}" for name in _OWNERS), *(f"{_JOB}/{name}" for name in _RECORDS), *_TOLD]
    others = [f"{_OTHER}/{name}" for name in ("control/order.json", "state.json", "checkpoints/commit/1/1.json")]
    for key in [*mine, *others, f"terraform/{CLUSTER}-{REGION}/terraform.tfstate"]:
        body = codec.to_json(state()).encode() if key == f"{_JOB}/state.json" else b'{"budget_usd": "20"}'
        s3.put_object(Bucket=_BUCKET, Key=key, Body=body, IfNoneMatch="*")
    group = Rig(lab).group()
    group.arm(GROUP, datetime.now(timezone.utc) + timedelta(minutes=30))
    group.resize(GROUP, 2, SPOT)


def _owned(lab: Lab, *, drives: bool) -> dict[str, Any]:
    """What no machine may change: objects with all their versions, the bucket's rules, the group's bounds."""
    s3, scaling = lab.client("s3"), lab.client("autoscaling")
    found: dict[str, Any] = {}
    for page in s3.get_paginator("list_object_versions").paginate(Bucket=_BUCKET):
        for one in [*page.get("Versions", ()), *page.get("DeleteMarkers", ())]:
            written = f"{_JOB}/checkpoints/", f"{_JOB}/outputs/", f"{_JOB}/status/"
            records = one["Key"].startswith(f"{_JOB}/") and "/control/" not in one["Key"]
            if not one["Key"].startswith(written) and not (records and drives):
                found.setdefault(one["Key"], []).append(one.get("ETag", "deleted"))
    found["versioning"] = s3.get_bucket_versioning(Bucket=_BUCKET)["Status"]
    found["lifecycle"] = json.dumps(s3.get_bucket_lifecycle_configuration(Bucket=_BUCKET)["Rules"], default=str)
    found["policy"] = s3.get_bucket_policy(Bucket=_BUCKET)["Policy"]
    (group,) = scaling.describe_auto_scaling_groups(AutoScalingGroupNames=[CLUSTER])["AutoScalingGroups"]
    found["most"] = group["MaxSize"]
    found["protected"] = group["NewInstancesProtectedFromScaleIn"]
    found["suspended"] = sorted(one["ProcessName"] for one in group["SuspendedProcesses"])
    found["tags"] = sorted((tag["Key"], tag["Value"]) for tag in group["Tags"])
    schedules = scaling.describe_scheduled_actions(**_GROUP)["ScheduledUpdateGroupActions"]
    found["schedules"] = sorted((one["ScheduledActionName"], str(one["StartTime"])) for one in schedules)
    found["roles"] = sorted(role["RoleName"] for role in lab.client("iam").list_roles()["Roles"])
    return found


class _Role:
    """What the job's own code can do on a machine: sign whatever it likes with the role's keys."""

    def __init__(self, lab: Lab, *, drives: bool) -> None:
        iam = lab.client("iam")
        who: dict[str, Any] = {"partition": "aws", "account": ACCOUNT, "regions": (REGION,)}
        bound = iam.create_policy(PolicyName=BOUNDARY, PolicyDocument=json.dumps(boundary_policy(**who)))
        iam.create_role(RoleName="node", AssumeRolePolicyDocument="{}", PermissionsBoundary=bound["Policy"]["Arn"])
        policy = node_policy(**who, cluster=CLUSTER, bucket=_BUCKET, unattended=drives)
        iam.put_role_policy(RoleName="node", PolicyName="job", PolicyDocument=json.dumps(policy))
        arn = f"arn:aws:iam::{ACCOUNT}:role/node"
        keys = lab.client("sts").assume_role(RoleArn=arn, RoleSessionName="i-0aaa")["Credentials"]
        names = {"AccessKeyId": "AWS_ACCESS_KEY_ID", "SecretAccessKey": "AWS_SECRET_ACCESS_KEY"}
        names |= {"SessionToken": "AWS_SESSION_TOKEN"}
        self.env = {name: str(keys[key]) for key, name in names.items()}
        self._session = boto3.Session(**{name.lower(): value for name, value in self.env.items()}, region_name=REGION)
        self._lab, self._url = lab, lab.url
        members = lab.client("autoscaling").describe_auto_scaling_groups(AutoScalingGroupNames=[CLUSTER])
        self._peer = members["AutoScalingGroups"][0]["Instances"][0]["InstanceId"]
        self._user = lab.client("iam").get_role(RoleName="node")["Role"]["RoleId"] + ":i-0aaa"

    def client(self, service: str) -> Any:
        """Return a client that repeats nothing."""
        config = botocore.config.Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"})
        return self._session.client(service, endpoint_url=self._url, config=config)

    def store(self) -> ObjectStore:
        """Return the job's store as the product opens it on the machine."""
        with self._on_it():
            return open_store(f"s3://{_BUCKET}")

    def attacks(self) -> Iterator[Attack]:
        """Yield the ways to change what is not a machine's to change."""
        yield from self._on_objects()
        yield from self._on_the_bucket()
        yield from self._on_the_group()
        yield from self._on_the_account()

    def _on_objects(self) -> Iterator[Attack]:
        s3, rich = self.client("s3"), b'{"budget_usd": "5000"}'
        held = [f"{_JOB}/control/{name}" for name in _OWNERS] + list(_TOLD)
        held += [f"{_OTHER}/control/order.json", f"{_OTHER}/state.json", f"{_OTHER}/checkpoints/commit/1/1.json"]
        held += [f"terraform/{CLUSTER}-{REGION}/terraform.tfstate"]
        for key in held:
            etag = '"' + "0" * 32 + '"'
            yield f"write {key}", _call(s3.put_object, Key=key, Body=rich, IfMatch=etag)
            yield f"delete {key}", _call(s3.delete_object, Key=key)
        order = f"{_JOB}/control/order.json"
        yield "delete the order's versions", _call(s3.delete_object, Key=order, VersionId="null")
        yield "a new arming", _call(s3.put_object, Key=f"{_JOB}/control/armings/9.json", Body=rich, IfNoneMatch="*")
        yield (
            "a copy over the order",
            _call(s3.copy_object, Key=order, CopySource={"Bucket": _BUCKET, "Key": f"{_JOB}/state.json"}),
        )
        yield "parts of an order", _call(s3.create_multipart_upload, Key=order)
        yield "many at once", _call(s3.delete_objects, Delete={"Objects": [{"Key": order}, {"Key": held[1]}]})
        for key in _RECORDS:
            yield f"delete {key}", _call(s3.delete_object, Key=f"{_JOB}/{key}")
        yield "the state's past", _call(s3.list_object_versions, Prefix=_JOB)
        yield "a slash twice", _call(s3.put_object, Key=f"{_JOB}//control/order.json", Body=rich, IfNoneMatch="*")

    def _on_the_bucket(self) -> Iterator[Attack]:
        s3 = self.client("s3")
        yield "no versions", _call(s3.put_bucket_versioning, VersioningConfiguration={"Status": "Suspended"})
        rule = {"ID": "x", "Status": "Enabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": 1}}
        yield (
            "lifetimes shortened",
            _call(s3.put_bucket_lifecycle_configuration, LifecycleConfiguration={"Rules": [rule]}),
        )
        yield "no rules", _call(s3.delete_bucket_policy)
        yield "other rules", _call(s3.put_bucket_policy, Policy='{"Version": "2012-10-17", "Statement": []}')

    def _on_the_group(self) -> Iterator[Attack]:
        scaling, later = self.client("autoscaling"), datetime.now(timezone.utc) + timedelta(days=9)
        yield "more machines", lambda: scaling.update_auto_scaling_group(**_GROUP, MaxSize=9)
        yield "more than the limit", lambda: scaling.set_desired_capacity(**_GROUP, DesiredCapacity=9)
        yield (
            "a later shut-off",
            lambda: scaling.put_scheduled_update_group_action(
                **_GROUP, ScheduledActionName="gpucloud-auto-shutdown", StartTime=later, MaxSize=0
            ),
        )
        yield (
            "no shut-off",
            lambda: scaling.delete_scheduled_action(**_GROUP, ScheduledActionName="gpucloud-auto-shutdown"),
        )
        yield "no schedules", lambda: scaling.suspend_processes(**_GROUP, ScalingProcesses=["ScheduledActions"])
        yield (
            "protection",
            lambda: scaling.set_instance_protection(**_GROUP, InstanceIds=[self._peer], ProtectedFromScaleIn=True),
        )
        yield (
            "protection of what comes",
            lambda: scaling.update_auto_scaling_group(**_GROUP, NewInstancesProtectedFromScaleIn=True),
        )
        yield (
            "out of the group",
            lambda: scaling.detach_instances(**_GROUP, InstanceIds=[self._peer], ShouldDecrementDesiredCapacity=True),
        )
        yield (
            "another owner",
            lambda: scaling.create_or_update_tags(
                Tags=[
                    {
                        "ResourceId": CLUSTER,
                        "ResourceType": "auto-scaling-group",
                        "Key": "gpucloud:cluster",
                        "Value": "x",
                    }
                ]
            ),
        )
        yield "the group's end", lambda: scaling.delete_auto_scaling_group(**_GROUP, ForceDelete=True)
        yield "a launch", lambda: scaling.launch_instances(**_GROUP, RequestedCapacity=1, ClientToken="x")

    def _on_the_account(self) -> Iterator[Attack]:
        iam, ec2 = self.client("iam"), self.client("ec2")
        every = json.dumps({"Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]})
        yield "more rights", lambda: iam.put_role_policy(RoleName="node", PolicyName="job", PolicyDocument=every)
        yield "no boundary", lambda: iam.delete_role_permissions_boundary(RoleName="node")
        yield "another role", lambda: iam.create_role(RoleName="gpucloud-x", AssumeRolePolicyDocument="{}")
        yield "a machine", lambda: ec2.run_instances(ImageId="ami-12c6146b", MinCount=1, MaxCount=1)
        yield "a peer's end", lambda: ec2.terminate_instances(InstanceIds=[self._peer])

    def job(self, *, drives: bool) -> Iterator[Attack]:
        """Yield what the product itself does there: it saves and resumes, and where it drives, it drives."""
        yield "a save, a resume and the next save", self._saves_and_resumes
        if drives:
            yield "a driver's turn", self._drives

    def _saves_and_resumes(self) -> None:
        base = None
        for attempt in (1, 2):
            checkpoints = Checkpoints(self.store(), f"{_JOB}/checkpoints", keep=1)
            found = next(checkpoints.candidates(), None)
            base = found.commit if found is not None else None
            if attempt > 1 and (found is None or checkpoints.fetch(found) != (b"weights of 1, 20",)):
                raise StoreError(f"attempt {attempt} resumes from {found}")
            checkpoints.begin(base=base, attempt=attempt)
            for step in (10 * attempt, 20 * attempt):
                commit = Commit(generation=checkpoints.generation, step=step)
                piece = checkpoints.upload(commit, "rank-0", memoryview(f"weights of {attempt}, {step}".encode()))
                checkpoints.commit(Manifest(commit=commit, world=1, promise=Promise(), pieces=(piece,)))
                checkpoints.collect()

    def _drives(self) -> None:
        jobs = JobStore(self.store(), "digits", on_machine=True)
        with self._on_it(), take(jobs, SystemClock(), node="i-0aaa") as lease:
            nodes = AwsNodeGroup(**{**Rig(self._lab).arguments(), "aws": Aws(region=REGION), "own": True})
            peer = next(node for node in nodes.describe(GROUP).alive if node.id != self._peer)
            jobs.records.append_log(1, 0, 0, DatedPiece(data=b"step 1"))
            jobs.records.keep_launch(1, 0, b"{}")
            nodes.terminate(GROUP, peer.id)
            jobs.bill(peer.id, ())
            lease.write(replace(lease.state, status=JobStatus.RUNNING))

    @contextlib.contextmanager
    def _on_it(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.env.items():
                patch.setenv(name, value)
            yield

    def work(self, *, drives: bool) -> Iterator[Attack]:
        """Yield what the job itself needs: train, save, resume, tell its key, lower its group; and drive."""
        s3, scaling = self.client("s3"), self.client("autoscaling")
        commit = f"{_JOB}/checkpoints/commit/1/1.json"
        yield "a save", _call(s3.put_object, Key=commit, Body=b"{}", IfNoneMatch="*")
        yield "a restore", _call(s3.get_object, Key=commit)
        yield "a listing", _call(s3.list_objects_v2, Prefix=f"{_JOB}/checkpoints/")
        yield "collection", _call(s3.delete_object, Key=commit)
        yield "an output", _call(s3.put_object, Key=f"{_JOB}/outputs/files/x", Body=b"x")
        yield "its status", _call(s3.put_object, Key=f"{_JOB}/status/i-0aaa", Body=b"x")
        yield "its order", _call(s3.get_object, Key=f"{_JOB}/control/order.json")
        yield "its code", _call(s3.get_object, Key=f"{_JOB}/control/code/0a")
        yield "its host key", _call(s3.put_object, Key=f"{_PLACE}/hosts/{self._user}", Body=b"ssh-ed25519 A")
        if drives:
            etag = s3.get_object(Bucket=_BUCKET, Key=f"{_JOB}/state.json")["ETag"]
            yield "its state", _call(s3.put_object, Key=f"{_JOB}/state.json", Body=b"{}", IfMatch=etag)
            yield "a charge", _call(s3.put_object, Key=f"{_JOB}/ledger/i-2.json", Body=b"{}", IfNoneMatch="*")
            yield "what to drive", _call(s3.get_object, Key=f"{_PLACE}/drive.json")
            yield "its group", lambda: scaling.describe_auto_scaling_groups(AutoScalingGroupNames=[CLUSTER])
            yield (
                "a machine replaced",
                lambda: scaling.terminate_instance_in_auto_scaling_group(
                    InstanceId=self._peer, ShouldDecrementDesiredCapacity=False
                ),
            )
        yield "its end", lambda: scaling.set_desired_capacity(**_GROUP, DesiredCapacity=0)

    def sees_that_nothing_is_to_drive(self, lab: Lab) -> bool:
        """Whether an order that is withdrawn is a missing object to the machine, and not a forbidden one."""
        where = {"Bucket": _BUCKET, "Key": f"{_PLACE}/drive.json"}
        lab.client("s3").delete_object(**where)
        try:
            self.client("s3").get_object(**where)
        except botocore.exceptions.ClientError as error:
            return str(error.response["Error"]["Code"]) == "NoSuchKey"
        return False


def _call(method: Callable[..., Any], **asked: Any) -> Callable[[], Any]:
    return lambda: method(Bucket=_BUCKET, **asked)


def _succeeds(deed: Callable[[], Any]) -> bool:
    try:
        deed()
    except (botocore.exceptions.ClientError, GpucloudError):
        return False
    return True


GOAL = Goal(
    promise="a job's code with its machine's role, attended or driving, changes no order, budget, arming, pinned code, "
    "record of the user's side, wall, other job or right; whatever it claims of a job that it drives, the user's side "
    "reckons no smaller sum, no later shut-off and no other price; and the same role saves, resumes and drives",
    real="the role's policy and boundary, boto3, the bucket with its own rules, the group with its schedule; the sums "
    "of `cost`, `budget` and whoever holds the job next; checkpoints, lease, ledger and group of a machine that drives",
    simulated="AWS (the lab; IAM's verdict by a judge over AWS's reference); the user's side reads what was claimed "
    "from a copy, with a cloud's list and prices made for it",
    run=run,
)
