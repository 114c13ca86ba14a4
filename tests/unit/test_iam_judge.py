"""The judge of IAM, and what the printed policies must not allow, by it."""

from __future__ import annotations

from typing import Any

import pytest

from gpucloud.adapters.aws.policy import boundary_arn, boundary_policy, node_policy, user_policy
from gpucloud.adapters.aws.statements import Uses
from tests.iam import forbidden, reference
from tests.iam.forbidden import ACCOUNT, REGION, Call
from tests.iam.judge import Need, Rights
from tests.iam.needs import needs

FACTS = forbidden.SomeAccount()
BUCKET = f"gpucloud-{ACCOUNT}-{REGION}"
_WHO: dict[str, Any] = {"partition": "aws", "account": ACCOUNT, "regions": (REGION,)}
CALLER = Rights.of(user_policy(**_WHO, boundary=boundary_arn("aws", ACCOUNT)).values())
LIMITS = boundary_policy(**_WHO)
KEYED = Uses(stores=(forbidden.BUCKET,), kms_keys=(forbidden.KEY,))
OWN = Uses(
    stores=(forbidden.BUCKET,), kms_keys=(forbidden.KEY,), instance_profile=forbidden.PROFILE,
    instance_role=forbidden.ROLE,
)  # fmt: skip


def of_a_node(*, unattended: bool) -> Rights:
    policy = node_policy(**_WHO, cluster="gpucloud-digits", bucket=BUCKET, unattended=unattended)
    return Rights.of([policy], LIMITS)


def rights(action: str, resource: str = "*", **condition: Any) -> Rights:
    statement = {"Sid": "X", "Effect": "Allow", "Action": [action], "Resource": [resource], "Condition": condition}
    return Rights.of([{"Statement": [statement]}])


def test_the_reference_knows_what_a_rule_is_judged_by_at_its_birth():
    assert reference.kinds("ec2:AuthorizeSecurityGroupEgress") == {"security-group": True, "security-group-rule": False}
    assert reference.knows("ec2:AuthorizeSecurityGroupEgress", "security-group-rule", "aws:RequestTag/x")
    assert not reference.knows("ec2:AuthorizeSecurityGroupEgress", "security-group-rule", "aws:ResourceTag/x")


def test_a_condition_on_what_a_request_cannot_have_is_not_met():
    need = Need(
        action="ec2:AuthorizeSecurityGroupEgress", arn="arn:x", kind="security-group-rule",
        context={"aws:ResourceTag/a": "b"},
    )  # fmt: skip
    assert not rights("ec2:*", StringEquals={"aws:ResourceTag/a": "b"}).allow(need)
    assert rights("ec2:*").allow(need)


@pytest.mark.parametrize(
    ("condition", "said", "met"),
    [
        ({"StringEquals": {"aws:RequestTag/a": ["x", "y"]}}, {"aws:RequestTag/a": "y"}, True),
        ({"StringEquals": {"aws:RequestTag/a": "x"}}, {}, False),
        ({"StringEqualsIfExists": {"aws:RequestTag/a": "x"}}, {}, True),
        ({"StringEqualsIfExists": {"aws:RequestTag/a": "x"}}, {"aws:RequestTag/a": "z"}, False),
        ({"StringNotEquals": {"aws:RequestTag/a": "x"}}, {}, True),
        ({"StringNotEquals": {"aws:RequestTag/a": ["x", "y"]}}, {"aws:RequestTag/a": "x"}, False),
        ({"StringLike": {"aws:RequestTag/a": "a*c"}}, {"aws:RequestTag/a": "a[b]c"}, True),
        ({"Null": {"aws:RequestTag/a": "true"}}, {}, True),
        ({"Null": {"aws:RequestTag/a": "false"}}, {}, False),
        ({"ForAllValues:StringEquals": {"aws:TagKeys": ["a", "b"]}}, {"aws:TagKeys": ("a", "c")}, False),
        ({"ForAllValues:StringEquals": {"aws:TagKeys": ["a", "b"]}}, {"aws:TagKeys": ()}, True),
        ({"ForAnyValue:StringEquals": {"aws:TagKeys": ["a"]}}, {"aws:TagKeys": ("c", "a")}, True),
        ({"ForAnyValue:StringEquals": {"aws:TagKeys": ["a"]}}, {}, False),
    ],
)
def test_conditions_are_met_as_iam_says(condition: dict[str, Any], said: dict[str, Any], met: bool):
    need = Need(action="ec2:CreateVpc", arn="arn:x", kind="vpc", context=said)
    assert rights("ec2:CreateVpc", **condition).allow(need) == met


@pytest.mark.parametrize(("arn", "met"), [("arn:x/*", True), ("arn:x/1", False), ("arn:x/", False)])
def test_a_star_in_braces_is_the_character(arn: str, met: bool):
    assert rights("fis:TagResource", "arn:x/${*}").allow(Need(action="fis:TagResource", arn=arn)) == met


def test_what_a_variable_stands_for_is_no_wildcard():
    need = Need(action="s3:GetObject", arn="arn:aws:s3:::b/i-1", kind="object", context={"aws:userid": "*"})
    assert not rights("s3:GetObject", "arn:aws:s3:::b/${aws:userid}").allow(need)


def test_what_is_denied_once_is_denied():
    deny = {"Statement": [{"Effect": "Deny", "Action": "s3:*", "Resource": "*"}]}
    allow = {"Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}
    need = Need(action="s3:GetObject", arn="arn:aws:s3:::b/k", kind="object")
    assert Rights.of([allow]).allow(need)
    assert not Rights.of([deny, allow]).allow(need)
    assert not Rights.of([allow], {"Statement": []}).allow(need)


def test_a_condition_that_the_judge_does_not_know_is_no_verdict():
    with pytest.raises(NotImplementedError, match="IpAddress"):
        rights("ec2:CreateVpc", IpAddress={"aws:RequestTag/a": "1"}).allow(
            Need(action="ec2:CreateVpc", kind="vpc", context={"aws:RequestTag/a": "1"})
        )


@pytest.mark.parametrize("call", forbidden.CALLERS, ids=lambda call: call.why)
def test_the_caller_may_not(call: Call):
    assert (CALLER.refused(needs(call.asked, FACTS)) is None) == call.fine


@pytest.mark.parametrize("call", forbidden.WITHOUT_KEY, ids=lambda call: call.why)
def test_the_caller_who_named_no_key_may_not(call: Call):
    assert CALLER.refused(needs(call.asked, FACTS)) is not None


@pytest.mark.parametrize("call", [*forbidden.KEYED_CALLERS, *forbidden.MAKERS], ids=lambda call: call.why)
def test_the_caller_with_a_key_of_his_own_may_not(call: Call):
    caller = Rights.of(user_policy(**_WHO, uses=KEYED, boundary=boundary_arn("aws", ACCOUNT)).values())
    assert (caller.refused(needs(call.asked, FACTS)) is None) == call.fine


@pytest.mark.parametrize("call", [*forbidden.KEYED_CALLERS, *forbidden.OWN_CALLERS], ids=lambda call: call.why)
def test_the_caller_with_a_profile_of_his_own_may_not(call: Call):
    caller = Rights.of(user_policy(**_WHO, uses=OWN, makes_roles=False).values())
    assert (caller.refused(needs(call.asked, FACTS)) is None) == call.fine


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("call", forbidden.KEYED_NODES, ids=lambda call: call.why)
def test_a_machine_with_a_key_that_is_reached_by_sessions_may_not(call: Call, *, bounded: bool):
    policy = node_policy(
        **_WHO, cluster="gpucloud-digits", bucket=forbidden.BUCKET, kms_keys=(forbidden.KEY,), unattended=True,
        session_manager=True,
    )  # fmt: skip
    limits = boundary_policy(**_WHO, uses=KEYED) if bounded else None
    assert (Rights.of([policy], limits).refused(needs(call.asked, FACTS)) is None) == call.fine


@pytest.mark.parametrize(
    "call", [*forbidden.NODES, *forbidden.ATTENDED, *forbidden.WITHOUT_SESSIONS], ids=lambda call: call.why
)
def test_a_machine_may_not(call: Call):
    assert (of_a_node(unattended=False).refused(needs(call.asked, FACTS)) is None) == call.fine


@pytest.mark.parametrize("call", [*forbidden.NODES, *forbidden.DRIVING], ids=lambda call: call.why)
def test_a_machine_that_drives_its_job_may_not(call: Call):
    assert (of_a_node(unattended=True).refused(needs(call.asked, FACTS)) is None) == call.fine


@pytest.mark.parametrize("call", forbidden.NODES, ids=lambda call: call.why)
def test_the_boundary_holds_a_role_with_every_right_from_what_changes_orders_and_walls(call: Call):
    changes = call.action in {"PutObject", "DeleteObject"} and "control/" in str(call.params.get("Key"))
    if call.service in {"iam", "ec2"} or changes:
        every = Rights.of([{"Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}], LIMITS)
        assert (every.refused(needs(call.asked, FACTS)) is None) == call.fine
