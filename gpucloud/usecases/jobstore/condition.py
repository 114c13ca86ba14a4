"""How a job stands, in the words that every line about it has: whether it trains, and whether anybody sees to it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Condition(str, Enum):
    """What goes on with a job now."""

    TRAINING = "training"
    UNSUPERVISED = "training_unsupervised"
    SILENT = "silent"  # nobody supervises, and none of the machines that run its attempt answers
    HANDING_OVER = "handing_over"  # one of its machines is about to supervise it, whether it trains or not
    TRAINED = "trained"  # its results are not home yet
    WAITING = "waiting"  # for machines
    STARTING = "starting"  # its machines are there, and no attempt has begun on them yet
    LEFT = "waiting_unsupervised"  # nothing trains: no attempt, or one whose machines are off, or that has ended there
    HELD = "held"  # its script failed, and its machines wait for the mended one
    KEPT = "kept"  # it succeeded, and its machines stay up for a look at them
    ENDING = "ending"  # over, and not torn down: machines, the node group, or results in its store are left
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What is left of a job that is over, and for what its machines are there."""

    torn_down: bool = False
    held: bool = False
    kept: bool = False


def condition_of(
    *,
    ended: bool,
    open_attempt: bool,
    trained: bool,
    supervised: bool,
    machines: int,
    left: Left = Left(),
) -> Condition:
    """Return how a job stands, its machines taken at their last word.

    An attempt whose machines are all gone trains nowhere, whatever the state says; `trained`: all its ranks are done.
    """
    if ended:
        return _of_ended(machines, left)
    if open_attempt and trained and (machines or supervised):
        return Condition.TRAINED
    if open_attempt and (machines or supervised):
        return Condition.TRAINING if supervised else Condition.UNSUPERVISED
    return Condition.WAITING if supervised else Condition.LEFT


def _of_ended(machines: int, left: Left) -> Condition:
    if machines and left.held:
        return Condition.HELD
    if machines and left.kept:
        return Condition.KEPT
    return Condition.ENDED if left.torn_down and not machines else Condition.ENDING


WORDS = {
    Condition.TRAINING: "training",
    Condition.UNSUPERVISED: "TRAINING, NOBODY SUPERVISES",
    Condition.SILENT: "NO MACHINE ANSWERS, NOBODY SUPERVISES",
    Condition.HANDING_OVER: "handing over to its machines",
    Condition.TRAINED: "trained, its results are not home yet",
    Condition.WAITING: "waiting for machines",
    Condition.STARTING: "starting",
    Condition.LEFT: "waiting, nobody supervises",
    Condition.HELD: "failed, machines held",
    Condition.KEPT: "succeeded, machines kept",
}
"""For a job that has not ended, or whose machines stay up for its user."""
