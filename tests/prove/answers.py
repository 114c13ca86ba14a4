"""What an answer says of a job, read out of its words as a user reads them, and what of it cannot be: pure functions.

Written anew by hand, and not as what makes the answers has it: a phrase that one command changes is unknown here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from tests.prove.asking import Held

CONDITIONS = {
    "training": "training",
    "TRAINING, NOBODY SUPERVISES": "training_unsupervised",
    "NO MACHINE ANSWERS, NOBODY SUPERVISES": "silent",
    "NO MACHINE OF ITS ATTEMPT ANSWERS, NOBODY SUPERVISES": "attempt_silent",
    "A MACHINE OF ITS ATTEMPT IS OFF, NOBODY SUPERVISES": "attempt_broken",
    "its script has failed, nobody supervises": "failed_unsupervised",
    "ending its attempt": "ending_attempt",
    "training, no machine answers": "training_unheard",
    "ending its attempt, no machine answers": "ending_attempt_unheard",
    "trained, being wound up": "winding_up",
    "trained, not wound up": "not_wound_up",
    "handing over to its machines": "handing_over",
    "trained, its results are not home yet": "trained",
    "waiting for machines": "waiting",
    "waiting for more machines": "waiting_for_more",
    "preparing its machines": "preparing",
    "starting": "starting",
    "waiting, nobody supervises": "waiting_unsupervised",
    "prepared, nothing trains on it": "prepared",
    "failed, machines held": "held",
    "succeeded, machines kept": "kept",
    **{f"{end}, ending its machines": "ending" for end in ("succeeded", "failed", "stopped")},
    **{f"{end}, not torn down": "not_torn_down" for end in ("succeeded", "failed", "stopped")},
    **{f"{end}, its results are in its store": "results_in_store" for end in ("succeeded", "failed", "stopped")},
    **dict.fromkeys(("succeeded", "failed", "stopped"), "ended"),
}
"""Every phrase for how a job stands, and the condition that programs read for it."""
_NOBODYS = {
    *(
        "training_unsupervised",
        "silent",
        "attempt_silent",
        "attempt_broken",
        "waiting_unsupervised",
        "failed_unsupervised",
    ),
    *("prepared", "handing_over", "not_wound_up", "not_torn_down", "results_in_store"),
}
_SOMEBODYS = {
    *("training", "training_unheard", "ending_attempt", "ending_attempt_unheard", "waiting", "waiting_for_more"),
    *("starting", "preparing", "winding_up", "ending"),
}
_OVER = ("succeeded", "failed", "stopped")
_LEFT_OVER = ("ending", "not_torn_down", "results_in_store", "ended")
_MINUTE = timedelta(minutes=1)
_LONGEST_FIRST = sorted(CONDITIONS, key=len, reverse=True)
_SUM = r"-?<?[0-9.]+"
_MONEY = re.compile(
    rf"(?P<spent>{_SUM}) of (?P<budget>{_SUM}) USD(?: · (?P<rate>{_SUM}) USD/h in all)?"
    rf"(?: · off by (?P<off>[0-9 :-]+) UTC(?: at the latest, at (?P<at>{_SUM}) USD| \(≤(?P<short>{_SUM}) USD\)))?"
)
_UNPROVEN = re.compile(rf"^unproven +(?P<usd>{_SUM}) USD", re.MULTILINE)
_LEFT = re.compile(rf"^(?:left|unused) +(?P<usd>{_SUM}) USD", re.MULTILINE)
_SUPERVISED = re.compile(
    r"(?:supervised by|has [a-z ]+, and) (its own node \S+?|process \d+ on \S+?)(?= since|,| winds it up|$)",
    re.MULTILINE,
)
_ATTEMPTS = re.compile(
    r"^\d+ +\d+ +(?:(?:steps )?\d+–(?P<last>\d+)(?: or more)?(?:, kept to \d+|, none kept)?|none) +(?P<ended>\S.*?)  ",
    re.MULTILINE,
)
_CHECKPOINT = re.compile(r"^checkpoint at (?:step|save) (?P<step>\d+)", re.MULTILINE)
_STEP = re.compile(r", (?:step|save) (?P<step>\d+)")
_CELL = re.compile(r"\s{2,}(?:save )?(?P<step>\d+|-)(?: \([0-9:]+\))?\s{2,}\d+\s{2,}\S+ of ")
_GOES_ON = re.compile(
    r" (?:trains on \d+ machines?|has lost a machine) \((?:step|save) (?P<step>\d+)\)"
    r"| goes on: attempt \d+ at (?:step|save) (?P<unheard>\d+)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What one answer says of the job; None, for each part, where it says nothing of it.

    Sums are as they are written, rounded or not. `phrase` is how it stands, in words; `off` the minute by which it is
    off at the latest, as it is written, and `off_usd` the sum then.
    """

    phrase: str | None = None
    condition: str | None = None
    supervisor: str | None = None
    budget: str | None = None
    spent: str | None = None
    unproven: str | None = None
    left: str | None = None
    rate: str | None = None
    off: str | None = None
    off_usd: str | None = None
    trained: int | None = None
    """By the table of attempts: the farthest that any came, whether that was lost or not."""
    reached: int | None = None
    """Where the job is now."""
    saved: int | None = None


def phrase_at(text: str) -> str | None:
    """Return the phrase for how a job stands that the text begins with; None where it begins with none."""
    return next((one for one in _LONGEST_FIRST if re.match(rf"{re.escape(one)}(?![\w-])", text)), None)


def read_line(text: str, before: str) -> Said:
    """Return how the job stands in the line that begins with `before`; nothing where there is no such line."""
    line = next((line for line in text.splitlines() if line.startswith(before)), None)
    if line is None:
        return Said()
    phrase = phrase_at(line.removeprefix(before).strip()) or line
    return Said(phrase=phrase, condition=CONDITIONS.get(phrase, "unknown"))


def read_money(text: str) -> dict[str, str | None]:
    """Return the sums of the first line of money in the text, and when all is off."""
    found = _MONEY.search(text)
    if found is None:
        return {}
    return {
        "spent": found["spent"],
        "budget": found["budget"],
        "rate": found["rate"] or "0",
        "off": found["off"],
        "off_usd": found["at"] or found["short"],
    }


def read_rows(text: str) -> dict[str, str | None]:
    """Return the rows below it: what is unproven, nothing being said of nothing, and what is left."""
    unproven, left = _UNPROVEN.search(text), _LEFT.search(text)
    return {"unproven": unproven["usd"] if unproven else "0", "left": left["usd"] if left else None}


def read_supervisor(text: str) -> str | None:
    """Return who supervises the job, as the text says; None where it names nobody."""
    found = _SUPERVISED.search(text)
    return found[1] if found else None


def read_steps(text: str) -> dict[str, int | None]:
    """Return the last step of the newest attempt that made one, by the table of attempts, and the one saved."""
    steps = [int(row["last"]) for row in _ATTEMPTS.finditer(text) if row["last"]]
    saved = _CHECKPOINT.search(text)
    return {"trained": max(steps, default=None), "saved": int(saved["step"]) if saved else None}


def read_step(line: str) -> int | None:
    """Return the step that a line about the job says it is at; None where it says none."""
    found = _STEP.search(line)
    return int(found["step"]) if found else None


def read_cell(text: str) -> int | None:
    """Return the step in the row of a list, 0 for none yet; None where no row has one."""
    found = _CELL.search(text)
    return None if found is None else int(found["step"].replace("-", "0"))


def read_going_on(text: str) -> int | None:
    """Return the step at which a start says that it finds the job; None where it says none."""
    found = _GOES_ON.search(text)
    return int(found["step"] or found["unheard"]) if found else None


def objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield each line of the text that is a JSON object."""
    for line in text.splitlines():
        if line.startswith("{"):
            yield json.loads(line)


def is_said(written: str, usd: str, *, is_most: bool = False) -> bool:
    """Whether a written sum is that one, rounded to the places that it is written with; "<0.001" is any below.

    One that `is_most` is rounded up.
    "0" stands for nothing written, which means nothing at all.
    """
    amount = Decimal(usd)
    if written == "0":
        return not amount
    if written.startswith("<"):
        return Decimal(0) < amount < Decimal(written.removeprefix("<"))
    _, _, places = written.partition(".")
    more, place = Decimal(written) - amount, Decimal(1).scaleb(-len(places))
    return 0 <= more < place if is_most else abs(more) <= place / 2


def strangely_written(told: dict[str, Any]) -> Iterator[str]:
    """Yield each sum of money in the object, at whatever depth, that is no plain decimal of at most eight places."""
    for key, value in told.items():
        if isinstance(value, dict):
            yield from strangely_written(value)
        elif isinstance(value, list):
            for one in value:
                yield from strangely_written(one) if isinstance(one, dict) else ()
        elif (key == "usd" or key.endswith("_usd")) and not re.fullmatch(r"-?\d+(\.\d{1,8})?", value or "0"):
            yield f"{key} is {value}"


# Whether it can be, and is what the others say.


@dataclass(frozen=True, slots=True, kw_only=True)
class Stands:
    """The job as the reference tells it, with what was laid there."""

    told: dict[str, Any]
    held: Held
    now: datetime
    exit_code: int

    @property
    def is_open(self) -> bool:
        return self.told["status"] not in _OVER

    @property
    def is_over(self) -> bool:
        return self.told["condition"] == "ended"


def impossible(stands: Stands) -> Iterator[str]:
    """Yield what the reference says that cannot be, whatever the others say."""
    told, sums = stands.told, stands.told["spend"].items()
    spend = {key: Decimal(value) for key, value in sums if key.endswith("_usd") and value is not None}
    used_usd = spend["spent_usd"] + spend["unproven_usd"] + spend["let_go_usd"]
    if spend["left_usd"] != spend["budget_usd"] - used_usd:
        yield f"left is {spend['left_usd']}, of {spend}"
    if spend.get("forecast_usd", Decimal(0)) > max(spend["budget_usd"], spend["spent_usd"] + spend["unproven_usd"]):
        yield f"it is to cost {spend['forecast_usd']}, of {spend}"
    yield from strangely_written(told)
    if (told["supervisor"] is None) != stands.held.is_free:
        yield f"it is supervised by {told['supervisor']}, and its lease is held: {stands.held.value}"
    if stands.is_open == (told["condition"] in ("held", "kept", *_LEFT_OVER)):
        yield f"it is {told['status']}, and {told['condition']}"
    if told["condition"] in _NOBODYS and told["supervisor"]:
        yield f"it is {told['condition']} with a supervisor"
    if told["condition"] in _SOMEBODYS and not told["supervisor"]:
        yield f"it is {told['condition']} without a supervisor"
    if told["condition"] in ("silent", "attempt_silent") and all(one["answers"] for one in told["use"]):
        yield "it is silent, and all of its machines answer"
    saved = told["checkpoint"]["step"] if told["checkpoint"] is not None else 0
    last = _last(told) or 0
    if told["status"] in ("failed", "stopped") and saved != last:
        yield f"it is {told['status']} with step {saved} saved, and {last} is said to count"
    if saved > last:
        yield f"step {saved} is saved, and {last} the last one trained"
    if told["last_step"] is not None and told["last_save"] is not None:
        yield f"step {told['last_step']} is the last one, and save {told['last_save']} too"


def _last(told: dict[str, Any]) -> int | None:
    """Return the last number of a job, or of an attempt, whichever it counts."""
    return told["last_step"] if told["last_save"] is None else told["last_save"]


def at_odds(said: Said, stands: Stands) -> Iterator[str]:
    """Yield what an answer says that is not as the reference tells it; sums may be rounded as they are written."""
    told, spend = stands.told, stands.told["spend"]
    if said.condition is not None and said.condition != told["condition"]:
        yield f"it is {said.phrase!r}, and the reference has {told['condition']}"
    if said.condition in _LEFT_OVER and not (said.phrase or "").startswith(told["status"]):
        yield f"it is {said.phrase!r}, and the reference has {told['status']}"
    if said.supervisor is not None and said.supervisor != (told["supervisor"] or ""):
        yield f"it is supervised by {said.supervisor!r}, and the reference has {told['supervisor']}"
    sums = {"budget": "budget_usd", "spent": "spent_usd", "unproven": "unproven_usd", "left": "left_usd"}
    for name, key in {**sums, "rate": "usd_per_hour"}.items():
        written = getattr(said, name)
        if written is not None and not is_said(written, spend[key]):
            yield f"{name} is {written}, and the reference has {spend[key]}"
    if said.rate is not None:
        yield from _off_at_odds(said, stands)
    saved = told["checkpoint"]["step"] if told["checkpoint"] is not None else None
    trained = max((last for one in told["attempts"] if (last := _last(one)) is not None), default=None)
    steps = (("trained", said.trained, trained), ("reached", said.reached, _last(told) or 0))
    for name, one, other in (*steps, ("saved", said.saved, saved)):
        if one is not None and one != other:
            yield f"step {one} is {name}, and the reference has {other}"


def _off_at_odds(said: Said, stands: Stands) -> Iterator[str]:
    """An answer with the rate says by when all is off, where anything is on: in minutes rounded up, as the sum is."""
    spend, paid = stands.told["spend"], stands.told["paid_until"]
    until = datetime.fromisoformat(paid) if paid is not None and Decimal(spend["promised_usd"]) else None
    if until is None or until <= stands.now:
        if said.off is not None:
            yield f"it is off by {said.off}, and nothing is on"
        return
    at = until if not (until.second or until.microsecond) else until.replace(second=0, microsecond=0) + _MINUTE
    expected = f"{at:%H:%M}" if at.date() == stands.now.date() else f"{at:%Y-%m-%d %H:%M}"
    if said.off != expected:
        yield f"it is off by {said.off}, and it is paid until {paid}"
    most = sum((Decimal(spend[f"{key}_usd"]) for key in ("spent", "unproven", "let_go", "promised")), Decimal(0))
    if said.off_usd is not None and not is_said(said.off_usd, str(most), is_most=True):
        yield f"it costs {said.off_usd} by then, and the reference has {most}"
