"""The printed policies: every call of whole runs passes, judged as AWS judges, and nothing passes that must not."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpucloud.adapters.aws.policy import boundary_arn, boundary_policy, node_policy, user_policy
from gpucloud.adapters.aws.statements import Uses
from tests.commandline import until
from tests.iam import forbidden, recording
from tests.iam.forbidden import ACCOUNT, REGION, Call, SomeAccount
from tests.iam.judge import Need, Rights
from tests.iam.needs import needs
from tests.prove.goal import Figure, Form, Goal
from tests.standins import session_manager
from tests.standins.aws import Account, account

_ONE, _TWO = (REGION,), (REGION, "us-west-2")  # of a job's file
_BOUNDARY = boundary_arn("aws", ACCOUNT)
_OURS = f"gpucloud-{ACCOUNT}-{REGION}"
_KEYED = Uses(stores=(forbidden.BUCKET,), kms_keys=(forbidden.KEY,))
_OWN = replace(_KEYED, instance_profile=forbidden.PROFILE, instance_role=forbidden.ROLE)


def run(form: Form) -> Iterator[Figure]:
    """Count calls that are refused and must pass, and calls that pass and must not."""
    calls = recording.read()
    if form is Form.LONG:
        calls = [*calls, *_live()]
    rights, of_two = _rights(_ONE), _rights(_TWO)
    refused = [
        (by, call, found)
        for by, call, wanted in calls
        for whose, all_ in ((rights, wanted), (of_two, wanted), (of_two, _moved(wanted)))
        if (found := whose[by].refused(all_))
    ]
    elsewhere = [(whose, replace(call, region=_TWO[1])) for whose, call in _table(_TWO) if call.region == REGION]
    table = [*_table(_ONE), *_table(_TWO), *elsewhere]
    allowed = [
        call.why for whose, call in table if (whose.refused(needs(call.asked, SomeAccount())) is None) != call.fine
    ]
    for what in [*refused, *allowed]:
        print(f"policy: {what}", file=sys.stderr)
    yield Figure(name="policy", value=len(refused) + len(allowed), limit=0)
    yield Figure(name="policy.calls", value=len(calls), limit=600, least=True)
    yield Figure(name="policy.callers", value=len({by for by, _, _ in calls}), limit=len(rights), least=True)
    yield Figure(name="policy.forbidden", value=sum(not call.fine for _, call in table), limit=400, least=True)


def _who(regions: tuple[str, ...]) -> dict[str, Any]:
    return {"partition": "aws", "account": ACCOUNT, "regions": regions}


def _moved(wanted: Iterable[Need]) -> tuple[Need, ...]:
    """Return what the same calls need in the second region; buckets, keys and roles stay where they are."""
    here, there = _TWO
    return tuple(
        need if need.action.startswith("kms:") else replace(
            need,
            arn=need.arn.replace(f":{here}:", f":{there}:"),
            context={**need.context, "aws:RequestedRegion": there},
        )
        for need in wanted
    )  # fmt: skip


def _machine(regions: tuple[str, ...], cluster: str, *, drives: bool = False) -> Rights:
    """Return the rights of a cluster's machines, under the boundary."""
    who = _who(regions)
    return Rights.of([node_policy(**who, cluster=cluster, bucket=_OURS, unattended=drives)], boundary_policy(**who))


def _rights(regions: tuple[str, ...]) -> dict[str, Rights]:
    """Return each caller's of the recording: with nothing of his own, with all of it, with several EFA interfaces."""
    keyed, own = _as_recorded(_KEYED), _as_recorded(_OWN)
    limits = boundary_policy(**_who(regions), uses=keyed)
    return {
        "caller": _caller(regions),
        "node": _machine(regions, "gpucloud-small"),
        "driver": _machine(regions, "gpucloud-small", drives=True),
        "own.caller": _caller(regions, own, makes_roles=False),
        "own.node": Rights.of([_own_machine(regions, "gpucloud-small", own)]),
        "own.driver": Rights.of([_own_machine(regions, "gpucloud-small", own, drives=True)]),
        "efa.caller": _caller(regions, keyed),
        "efa.node": Rights.of([_own_machine(regions, "gpucloud-small", keyed)], limits),
    }


def _caller(regions: tuple[str, ...], uses: Uses | None = None, *, makes_roles: bool = True) -> Rights:
    printed = user_policy(**_who(regions), uses=uses, boundary=_BOUNDARY, makes_roles=makes_roles)
    return Rights.of(printed.values())


def _own_machine(regions: tuple[str, ...], cluster: str, uses: Uses, *, drives: bool = False) -> dict[str, Any]:
    """Return the policy of machines with a bucket under a key, which are reached by sessions."""
    where: dict[str, Any] = {"cluster": cluster, "bucket": uses.stores[0], "kms_keys": uses.kms_keys}
    return node_policy(**_who(regions), **where, unattended=drives, session_manager=True)


def _as_recorded(uses: Uses) -> Uses:
    return replace(uses, kms_keys=tuple(recording.alike(key) for key in uses.kms_keys))


def _table(regions: tuple[str, ...]) -> list[tuple[Rights, Call]]:
    attended, driving = (_machine(regions, "gpucloud-digits", drives=drives) for drives in (False, True))
    own = _own_machine(regions, "gpucloud-digits", _OWN, drives=True)
    plain, keyed, owner = (
        _caller(regions), _caller(regions, _KEYED), _caller(regions, _OWN, makes_roles=False)
    )  # fmt: skip
    nobodys = [call for call in forbidden.CALLERS if not call.fine]
    return [
        *((plain, call) for call in (*forbidden.CALLERS, *forbidden.WITHOUT_KEY)),
        *((attended, call) for call in (*forbidden.NODES, *forbidden.ATTENDED, *forbidden.WITHOUT_SESSIONS)),
        *((driving, call) for call in (*forbidden.NODES, *forbidden.DRIVING, *forbidden.WITHOUT_SESSIONS)),
        *((keyed, call) for call in (*forbidden.CALLERS, *forbidden.KEYED_CALLERS, *forbidden.MAKERS)),
        *((owner, call) for call in (*nobodys, *forbidden.KEYED_CALLERS, *forbidden.OWN_CALLERS)),
        *((Rights.of([own]), call) for call in forbidden.KEYED_NODES),
        *((Rights.of([own], boundary_policy(**_who(regions), uses=_KEYED)), call) for call in forbidden.KEYED_NODES),
    ]


def _live() -> list[tuple[str, str, Any]]:
    rows = [*_attended(), *_driven(), *_own_attended(), *_own_driven(), *_several_efa()]
    if os.environ.get("GPUCLOUD_PROVE_RECORD"):
        recording.write(rows)
    return recording.parsed(rows)


def _attended() -> Iterable[list[Any]]:
    """Every command that asks AWS for something, over one job with a drill; nothing may be refused."""
    with tempfile.TemporaryDirectory() as folder, account(Path(folder)) as aws:
        file = aws.job(steps=60, step_s=0.05)
        for command in (
            ("iam", "policy"), ("doctor",), ("quota", "show", file), ("quota", "request", file, "--vcpus", "1000"),
            ("quota", "status", file), ("plan", file), ("up", file), ("doctor", "small"),
            ("train", file, "--drill", "--json"), ("cost", "small"), ("cost", "small", "--bill"),
            ("checkpoints", "small"), ("down", "small"), ("gc",), ("catalog", "refresh"),
            ("down", "--base", "--with-data", "--yes"),
        ):  # fmt: skip
            _succeeds(aws, *command)
        return _kept(aws, node="gpucloud-small-us-east-1")


def _driven() -> Iterable[list[Any]]:
    """A job that drives itself: its command is killed, a machine is lost, and it ends by itself."""
    with tempfile.TemporaryDirectory() as folder, account(Path(folder)) as aws:
        _drives_itself(aws, aws.job(steps=60, step_s=0.1))
        return _kept(aws, driver="gpucloud-small-us-east-1")


def _own_attended() -> Iterable[list[Any]]:
    """The same with a profile, a bucket and a key of the user's own, by sessions; he makes no roles."""
    with tempfile.TemporaryDirectory() as folder, _company(Path(folder), uses=_OWN, makes_roles=False) as aws:
        file = _keyed_job(aws, "access: session_manager, instance_profile: nodes")
        _give_role(aws, file, "--machines")
        for command in (
            ("iam", "policy", file), ("doctor",), ("plan", file), ("up", file), ("doctor", "small"),
            ("train", file, "--json"), ("cost", "small"), ("checkpoints", "small"), ("down", "small"), ("gc",),
            ("down", "--base"),
        ):  # fmt: skip
            _succeeds(aws, *command)
        return _kept(aws, **{"own.caller": "caller", "own.node": "nodes"})


def _own_driven() -> Iterable[list[Any]]:
    """The job drives itself under the profile of the user's own; its machines have several EFA interfaces."""
    with tempfile.TemporaryDirectory() as folder, _company(Path(folder), uses=_OWN, makes_roles=False) as aws:
        file = _keyed_job(aws, "instance_profile: nodes", efa=True)
        _give_role(aws, file, "--self-driving")
        _drives_itself(aws, file)
        return _kept(aws, **{"own.caller": "caller", "own.driver": "nodes"})


def _several_efa() -> Iterable[list[Any]]:
    """Machines with several EFA interfaces, whose roles are made: private subnets, a way out for them, sessions."""
    with tempfile.TemporaryDirectory() as folder, _company(Path(folder), uses=_KEYED) as aws:
        file = _keyed_job(aws, efa=True)
        for command in (("plan", file), ("up", file), ("doctor", "small"), ("train", file, "--json"),
                        ("down", "small"), ("gc",), ("down", "--base")):  # fmt: skip
            _succeeds(aws, *command)
        return _kept(aws, **{"efa.caller": "caller", "efa.node": "gpucloud-small-us-east-1"})


@contextmanager
def _company(folder: Path, *, uses: Uses, makes_roles: bool = True) -> Iterator[Account]:
    """An account with a bucket under a key, a profile with a role, and the programs for sessions on PATH."""
    with account(folder, uses=uses, makes_roles=makes_roles) as aws:
        s3, iam = aws.lab.client("s3"), aws.lab.client("iam")
        s3.create_bucket(Bucket=forbidden.BUCKET)
        rule = {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": forbidden.KEY}}
        s3.put_bucket_encryption(Bucket=forbidden.BUCKET, ServerSideEncryptionConfiguration={"Rules": [rule]})
        iam.create_role(RoleName="nodes", Path="/research/", AssumeRolePolicyDocument="{}")
        iam.create_instance_profile(InstanceProfileName="nodes", Path="/research/")
        iam.add_role_to_instance_profile(InstanceProfileName="nodes", RoleName="nodes")
        tools = session_manager.install(folder / "tools")
        aws.line.env["PATH"] = f"{tools}{os.pathsep}{aws.line.env['PATH']}"
        aws.bucket = forbidden.BUCKET
        yield aws


def _keyed_job(aws: Account, choices: str = "", *, efa: bool = False) -> str:
    """Write a job that keeps everything in the company's bucket, its disks under the company's key."""
    keyed = ", ".join(filter(None, (f"kms_key: '{forbidden.KEY}'", choices)))
    return aws.job(
        steps=60,
        step_s=0.1,
        wishes="types: [p4d.24xlarge]" if efa else "",
        budget="500 USD",
        extra=f"cloud: aws\nstore: s3://{forbidden.BUCKET}\naws: {{{keyed}}}\n",
    )


def _give_role(aws: Account, file: str, whose: str) -> None:
    """Give the profile's role what is printed for it, and nothing beside."""
    printed = _succeeds(aws, "iam", "policy", whose, file)
    json.loads(printed)
    aws.lab.client("iam").put_role_policy(RoleName="nodes", PolicyName="printed", PolicyDocument=printed)


def _drives_itself(aws: Account, file: str) -> None:
    aws.lab.world.node_env["GPUCLOUD_AWS_POLL_S"] = "0.3"
    command = aws.line.start("train", file, "--unattended", "1h")
    until(lambda: len(aws.alive("small")) == 2 or command.poll() is not None, "machines", 900)
    os.killpg(command.pid, signal.SIGKILL)
    command.wait()
    until(lambda: aws.commits("small") > 0, "a machine drives", 900)
    aws.lab.take(aws.alive("small")[0])
    until(lambda: aws.state("small").get("status") not in {"running", "waiting", "starting"}, "the end", 900)
    _succeeds(aws, "down", "small")


def _succeeds(aws: Account, *command: str) -> str:
    """Return the answer. A recording of what fails would prove nothing: it lacks the calls that follow."""
    answer = aws.line.run(*command, limit_s=900)
    if answer.code:
        raise AssertionError(f"{' '.join(command)} exited with {answer.code}: {answer.stderr[-2000:]}")
    return answer.stdout


def _kept(aws: Account, **roles: str) -> list[list[Any]]:
    """Return each kind of call once, by who made it: a name in the recording for the caller and each role."""
    judged = aws.lab.judged
    for one in judged:
        if one.refused is not None:
            print(f"policy: {one.by}: {one.call}: {one.refused}", file=sys.stderr)
    named = {"caller": "caller", **roles} if "caller" not in roles.values() else roles
    return [
        row
        for name, who in named.items()
        for row in recording.kept(name, [one for one in judged if one.by == who])
    ]  # fmt: skip


GOAL = Goal(
    promise="with the printed policies, and under the printed boundary, every call of up, train, an interruption, "
    "self-driving, cost, down, gc, doctor, quota and a drill passes, with a profile, a store and a key of the user's "
    "own, by sessions and with several EFA interfaces too; and no call that would reach further does",
    real="the policies, the calls of Terraform and boto3 (recorded; in the long form made anew), AWS's reference of "
    "resource types and condition keys",
    simulated="IAM's verdict, by a judge of our own; what AWS checks beyond its reference; the account (the lab); "
    "Session Manager's agent and plugin",
    run=run,
)
