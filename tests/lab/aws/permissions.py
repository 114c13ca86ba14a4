"""IAM: what an instance's role may do, and, where a test says so, what gpucloud's caller may; judged as AWS judges.

Kinder than AWS in one point: a role without any policy, as a test makes one in a line, is not judged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from moto.iam.models import iam_backends
from moto.sts.models import sts_backends

from tests.iam.judge import Document, Need, Rights, statements_of
from tests.iam.needs import Asked, needs
from tests.lab.aws import faults
from tests.lab.aws.calls import Call
from tests.lab.aws.facts import LabFacts
from tests.lab.aws.faults import Reply
from tests.lab.aws.world import ACCESS_KEY, ACCOUNT

OWN_AGENT = "lab-itself"  # marks the calls of tests


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One call, what it needed, and what of it was refused."""

    by: str  # "caller", or a role's name
    call: str
    needs: tuple[Need, ...]
    refused: Need | None


@dataclass(frozen=True, slots=True)
class _Who:
    rights: Rights | None  # None: everything
    name: str
    user: str  # `aws:userid`


class Permissions:
    """Judges each call. `caller` None: gpucloud's own keys may do everything, and are not looked at."""

    def __init__(self) -> None:
        self.caller: Rights | None = None
        self.judged: list[Judged] = []
        self._facts = LabFacts()

    def denied(self, call: Call, body: bytes) -> Reply | None:
        """Return AccessDenied if whoever signed the call has not the right to it."""
        if OWN_AGENT in call.agent or (call.service, call.action) == ("sts", "GetCallerIdentity"):
            return None
        who = self._who(call.key)
        if who is None or who.rights is None:
            return None
        refused = self._refused(who, f"{call.service} {call.action}", needs(asked_of(call, body), self._facts))
        if refused is None:
            return None
        code = "UnauthorizedOperation" if call.service == "ec2" else "AccessDenied"
        return faults.error(call.service, code, f"{who.name} is not authorized to perform: {refused}", 403)

    def refused_to_key(self, key: str, call: str, wanted: Iterable[Need]) -> Need | None:
        """Return what of a call that the lab does not see is refused to whoever has the key."""
        who = self._who(key)
        return None if who is None else self._refused(who, call, wanted)

    def refused_to_role(self, arn: str, call: str, wanted: Iterable[Need]) -> Need | None:
        """Return what of a call that the lab does not see is refused to a machine with the role."""
        return self._refused(_Who(_rights_of(arn), _name(arn), "AROALAB"), call, wanted)

    def user_of(self, key: str) -> str:
        """Return `aws:userid` of whoever has the key."""
        who = self._who(key)
        return who.user if who else ""

    def _who(self, key: str) -> _Who | None:
        session = sts_backends[ACCOUNT]["aws"].get_assumed_role_from_access_key(key)
        if session is not None:
            return _Who(_rights_of(session.role_arn), _name(session.role_arn), session.user_id)
        return _Who(self.caller, "caller", "AIDALAB") if key == ACCESS_KEY else None

    def _refused(self, who: _Who, call: str, asked: Iterable[Need]) -> Need | None:
        if who.rights is None:
            return None
        wanted = tuple(_by(who.user, asked))
        refused = who.rights.refused(wanted)
        self.judged.append(Judged(by=who.name, call=call, needs=wanted, refused=refused))
        return refused


def asked_of(call: Call, body: bytes) -> Asked:
    """Return the call as IAM meets it."""
    deleting = call.action == "DeleteObjects"
    keys = tuple(found.decode() for found in re.findall(rb"<Key>([^<]+)</Key>", body)) if deleting else ()
    return Asked(
        service=call.service,
        action=call.action,
        params=call.params,
        region=call.region,
        account=ACCOUNT,
        keys=keys,
        versioned=deleting and b"<VersionId>" in body,
    )


def _by(user: str, wanted: Iterable[Need]) -> Iterator[Need]:
    for one in wanted:
        yield Need(action=one.action, arn=one.arn, kind=one.kind, context={**one.context, "aws:userid": user})


def _name(role_arn: str) -> str:
    return role_arn.rpartition("/")[2]


def _rights_of(role_arn: str) -> Rights | None:
    iam = iam_backends[ACCOUNT]["aws"]
    role = next((one for one in iam.roles.values() if one.arn == role_arn), None)
    if role is None:
        return None
    managed = [_document(policy) for policy in role.managed_policies.values()]
    documents: list[Document] = [json.loads(text) for text in [*role.policies.values(), *managed]]
    if not documents:
        return None
    bound = iam.managed_policies.get(role.permissions_boundary_arn or "")
    limits = None if bound is None else statements_of(json.loads(_document(bound)))
    return Rights(tuple(one for document in documents for one in statements_of(document)), limits)


def _document(policy: Any) -> str:
    return next(str(one.document) for one in policy.versions if one.version_id == policy.default_version_id)
