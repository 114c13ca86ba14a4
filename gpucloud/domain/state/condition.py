"""How a job stands, in the words that every line about it has: whether it trains, and whether anybody sees to it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Condition(str, Enum):
    """What goes on with a job now."""

    TRAINING = "training"
    UNSUPERVISED = "training_unsupervised"
    TRAINED = "trained"  # its results are not home yet
    WAITING = "waiting"  # for machines, or until they are ready
    LEFT = "waiting_unsupervised"
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
    *, ended: bool, open_attempt: bool, trained: bool, supervised: bool, machines: int, left: Left = Left()
) -> Condition:
    """Return how a job stands.

    An attempt whose machines are all gone trains nowhere, whatever the books say; `trained`: all its ranks are done.
    """
    if ended:
        return _of_ended(machines, left)
    if open_attempt and trained:
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
    Condition.TRAINED: "trained, its results are not home yet",
    Condition.WAITING: "waiting for machines",
    Condition.LEFT: "waiting, nobody supervises",
    Condition.HELD: "failed, machines held",
    Condition.KEPT: "succeeded, machines kept",
}
"""For a job that has not ended, or whose machines stay up for its user."""
