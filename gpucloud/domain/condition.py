"""How a job stands, in the words that every line about it has: whether it trains, and whether anybody sees to it."""

from __future__ import annotations

from enum import Enum


class Condition(str, Enum):
    """What goes on with a job now."""

    TRAINING = "training"
    UNSUPERVISED = "training_unsupervised"
    TRAINED = "trained"  # its results are not home yet
    WAITING = "waiting"  # for machines, or until they are ready
    LEFT = "waiting_unsupervised"
    ENDING = "ending"  # over, and not all of its machines are
    ENDED = "ended"


def condition_of(*, ended: bool, open_attempt: bool, trained: bool, supervised: bool, machines: int) -> Condition:
    """Return how a job stands.

    An attempt whose machines are all gone trains nowhere, whatever the books say; `trained`: all its ranks are done.
    """
    if ended:
        return Condition.ENDING if machines else Condition.ENDED
    if open_attempt and trained:
        return Condition.TRAINED
    if open_attempt and (machines or supervised):
        return Condition.TRAINING if supervised else Condition.UNSUPERVISED
    return Condition.WAITING if supervised else Condition.LEFT


WORDS = {
    Condition.TRAINING: "training",
    Condition.UNSUPERVISED: "TRAINING, NOBODY SUPERVISES",
    Condition.TRAINED: "trained, its results are not home yet",
    Condition.WAITING: "waiting for machines",
    Condition.LEFT: "waiting, nobody supervises",
}
"""For a job that has not ended."""
