"""Every error code of AWS has one meaning, one line and one next step; one that nobody knows stops the job safely."""

from __future__ import annotations

import ast
import inspect
import random
import re
import string
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from decimal import Decimal

from botocore.exceptions import ClientError

from gpucloud.adapters.aws import faults
from gpucloud.adapters.aws.faults import CODES, PROSE, UNKNOWN, explained, known
from gpucloud.adapters.aws.nodes.listing import Listing
from gpucloud.adapters.aws.nodes.watch import refusals_told
from gpucloud.domain.errors import CredentialsError, GpucloudError, ProvisionError
from gpucloud.domain.job.spec import Market
from gpucloud.domain.node.node import Fault, GroupView, Refusal
from gpucloud.domain.offer import Pool
from gpucloud.domain.state.state import JobState
from gpucloud.domain.supervision.action import Action, CoolDown, Finish, Resize
from gpucloud.domain.supervision.reconcile import decide
from gpucloud.domain.supervision.snapshot import Goal as Wanted
from gpucloud.domain.supervision.snapshot import Rules, Snapshot
from tests.prove.goal import Figure, Form, Goal

NOW = datetime(2030, 1, 1, 12, tzinfo=timezone.utc)
POOL = Pool(instance_type="g5.xlarge", zone="us-east-2a", market=Market.SPOT)
ACTIONS: dict[Fault, type[Action]] = {
    Fault.CAPACITY: CoolDown,
    Fault.QUOTA: CoolDown,
    Fault.CREDENTIALS: Finish,
    Fault.PERMISSION: Finish,
    Fault.PARAMETER: Finish,
    Fault.THROTTLING: Resize,
    Fault.TRANSIENT: Resize,
    Fault.UNKNOWN: Finish,
}
"""The next step after each kind of refusal: another pool, the end with a hint, or the same again."""
_PASSES = (Fault.THROTTLING, Fault.TRANSIENT)
_UNKNOWN = {Form.SHORT: 500, Form.LONG: 20_000}
_SEED = 22


def _run(form: Form) -> Iterator[Figure]:
    chance = random.Random(_SEED)
    unheard_of = {_made_up(chance) for _ in range(_UNKNOWN[form])}
    table = [*_written_twice(), *(wrong for code in CODES for wrong in _wrong(code)), *_wrong_words()]
    strange = [wrong for code in sorted(unheard_of) for wrong in _wrong_for_unknown(code)]
    for line in (*table, *strange):
        sys.stderr.write(f"errors: {line}\n")
    yield Figure(name="errors", value=len(table) + len(strange), limit=0)
    yield Figure(name="errors.codes", value=len(CODES), limit=25, least=True)
    yield Figure(name="errors.unknown", value=len(unheard_of), limit=_UNKNOWN[form] * 0.99, least=True)


def _written_twice() -> list[str]:
    """A code that is written twice in the table has two meanings, of which Python keeps the last without a word."""
    tables = [node for node in ast.walk(ast.parse(inspect.getsource(faults))) if isinstance(node, ast.Dict)]
    written = Counter(key.value for table in tables for key in table.keys if isinstance(key, ast.Constant))
    return [f"{code} is written {count} times" for code, count in written.items() if count > 1] + [
        f"{code} is not written out" for code in CODES if code not in written
    ]


def _wrong(code: str) -> Iterator[str]:
    meaning = known(code)
    if meaning is UNKNOWN or not meaning.line or not meaning.step or "\n" in meaning.line + meaning.step:
        yield f"{code}: no line and step of its own: {meaning}"
    yield from _wrong_error(code, meaning.fault, meaning.line)
    yield from _wrong_action(_refusal(code, meaning.fault))
    if re.search(r"[a-z][A-Z]", code):  # others are plain English too, and are not looked for in prose
        for text in (code, f"Launching failed. {code}: no luck", f"Client.{code}" if "." not in code else code):
            (told,) = refusals_told(_listed(text), POOL)
            if (told.code, told.fault) != (code, meaning.fault) and not _is_prefixed(told.code):
                yield f"{code}: an activity that says {text!r} is read as {told.code}"
            yield from _wrong_action(told)


def _wrong_for_unknown(code: str) -> Iterator[str]:
    if known(code) is not UNKNOWN:
        yield f"{code} is nobody's code, and means {known(code)}"
    yield from _wrong_error(code, Fault.UNKNOWN, "as AWS says it")
    (told,) = refusals_told(_listed(f"{code}: something new"), POOL)
    if told.fault is not Fault.UNKNOWN or "something new" not in told.message:
        yield f"an activity that says {code} is read as {told}"
    yield from _wrong_action(told)


def _is_prefixed(code: str) -> bool:
    """Whether the table lists the code with its `Client.` or `Server.` in front, with a meaning of its own."""
    return code.startswith(("Client.", "Server.")) and code in CODES


def _wrong_error(code: str, fault: Fault, line: str) -> Iterator[str]:
    """What a command says of the error: its class, its exit code, AWS's code, our line, one hint."""
    found: GpucloudError | None = None
    try:
        with explained("start machines"):
            raise ClientError({"Error": {"Code": code, "Message": "as AWS says it"}}, "RunInstances")
    except GpucloudError as error:
        found = error
    kind = CredentialsError if fault is Fault.CREDENTIALS else ProvisionError
    if type(found) is not kind or found.exit_code != (3 if fault is Fault.CREDENTIALS else 13):
        yield f"{code}: becomes {found!r}"
        return
    whole = found.message.startswith(f"cannot start machines: {line}") and found.message.endswith(f"({code})")
    if not whole or found.hint != known(code).step or found.may_pass != (fault in _PASSES):
        yield f"{code}: {found.message} / {found.hint} / {found.may_pass}"


def _wrong_action(refusal: Refusal) -> Iterator[str]:
    action = decide(Wanted(nodes=2, budget_usd=Decimal(100)), _seen(refusal), Rules())
    if type(action) is not ACTIONS[refusal.fault]:
        yield f"{refusal.code}: {refusal.fault.value} is followed by {action}"
    elif isinstance(action, Finish):
        told = action.message or ""
        if action.reason.exit_code != 13 or any(
            part not in told for part in (refusal.code, refusal.message, refusal.hint)
        ):
            yield f"{refusal.code}: the end does not say what, why and what to do: {action}"
    elif isinstance(action, CoolDown) and (action.pool, action.code) != (POOL, refusal.code):
        yield f"{refusal.code}: {action}"


def _wrong_words() -> Iterator[str]:
    for words, code in PROSE:
        if code not in CODES:
            yield f"the words {words!r} mean {code}, which is not in the table"


def _refusal(code: str, fault: Fault) -> Refusal:
    meaning, at = known(code), NOW - timedelta(minutes=1)
    return Refusal(pool=POOL, fault=fault, code=code, message=meaning.line, at=at, hint=meaning.step)


def _listed(text: str) -> Listing:
    """A group of an hour ago, whose last launch failed with those words."""
    when = NOW - timedelta(minutes=1)
    failed = {"StatusCode": "Failed", "Description": "Launching a new EC2", "StatusMessage": text, "StartTime": when}
    return Listing(group={"CreatedTime": NOW - timedelta(hours=1)}, instances=(), activities=(failed,))


def _seen(refusal: Refusal) -> Snapshot:
    until = NOW + timedelta(minutes=20)
    state = JobState(
        job="small",
        pool=POOL,
        cap_usd_per_hour=Decimal("0.9"),
        group="gpucloud-small",
        paid_until=until,
    )
    group = GroupView(exists=True, size=0, armed_until=until, nodes=(), refusals=(refusal,))
    return Snapshot(now=NOW, state=state, group=group, payable_until=until, payable_with_another=until)


def _made_up(chance: random.Random) -> str:
    """A code as AWS may name one some day: known words in new order, or new words."""
    humps = sorted({hump for code in CODES for hump in re.findall(r"[A-Z][a-z]+", code)})
    invented = "".join(chance.choice(string.ascii_lowercase) for _ in range(chance.randint(3, 9))).capitalize()
    words = [*chance.sample(humps, chance.randint(1, 3)), invented]
    chance.shuffle(words)
    return (
        chance.choice(["", "", "", "Client.", "Server."]) + "".join(words) + chance.choice(["", "Exception", "Fault"])
    )


GOAL = Goal(
    promise="each of AWS's error codes is one kind of fault with one line, one hint and one next step, as a command's"
    " error and as a refused launch; a code that nobody knows stops the job, starts nothing and names the code",
    real="the table, the translation of boto3's errors and of scaling activities, and the decision",
    simulated="the errors are made from the codes; whole jobs meet them in tests/functional/aws",
    run=_run,
)
