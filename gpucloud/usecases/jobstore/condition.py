"""How a job stands, in the words that every line about it has: whether it trains, and whether anybody sees to it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Condition(str, Enum):
    """What goes on with a job now, as text (`WORDS`) and JSON tell it; those below a `broad` one are cases of that."""

    TRAINING = "training"
    UNHEARD = "training_unheard"  # somebody supervises, whom none of the machines that run its attempt answers
    ENDING_ATTEMPT = "ending_attempt"  # its attempt was told to end for good
    ENDING_UNHEARD = "ending_attempt_unheard"  # both
    UNSUPERVISED = "training_unsupervised"
    SILENT = "silent"  # nobody supervises, and none of its machines answers
    ATTEMPT_SILENT = "attempt_silent"  # so with those that run its attempt; another one answers
    HANDING_OVER = "handing_over"  # one of its machines is about to supervise it, whether it trains or not
    TRAINED = "trained"  # its results are not home yet
    WINDING_UP = "winding_up"  # trained without outputs: somebody ends it
    NOT_WOUND_UP = "not_wound_up"  # so, and nobody does
    WAITING = "waiting"  # for machines
    WAITING_FOR_MORE = "waiting_for_more"  # some are there
    STARTING = "starting"  # its machines are there and ready, and no attempt has begun on them yet
    PREPARING = "preparing"  # they are there, and are made ready
    LEFT = "waiting_unsupervised"  # nothing trains: no attempt, or one whose machines are off, or that has ended there
    FAILED_THERE = "failed_unsupervised"  # so: its script has failed by its own error
    PREPARED = "prepared"  # so: machines are ready, and have no attempt
    HELD = "held"  # its script failed, and its machines wait for the mended one
    KEPT = "kept"  # it succeeded, and its machines stay up for a look at them
    ENDING = "ending"  # over, and what is left is being ended: machines, the node group, or results in its store
    NOT_TORN_DOWN = "not_torn_down"  # over, and nobody ends that
    ENDED = "ended"

    @property
    def broad(self) -> Condition:
        """What it is a case of, itself for most: what is done about it depends on that."""
        return _BROAD.get(self, self)


_BROAD = {
    Condition.UNHEARD: Condition.TRAINING,
    Condition.ENDING_ATTEMPT: Condition.TRAINING,
    Condition.ENDING_UNHEARD: Condition.TRAINING,
    Condition.ATTEMPT_SILENT: Condition.SILENT,
    Condition.WINDING_UP: Condition.TRAINED,
    Condition.NOT_WOUND_UP: Condition.TRAINED,
    Condition.WAITING_FOR_MORE: Condition.WAITING,
    Condition.PREPARING: Condition.STARTING,
    Condition.FAILED_THERE: Condition.LEFT,
    Condition.PREPARED: Condition.LEFT,
    Condition.NOT_TORN_DOWN: Condition.ENDING,
}


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
    """Return how a job stands, broadly, its machines taken at their last word.

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
    Condition.UNHEARD: "training, no machine answers",
    Condition.ENDING_ATTEMPT: "ending its attempt",
    Condition.ENDING_UNHEARD: "ending its attempt, no machine answers",
    Condition.UNSUPERVISED: "TRAINING, NOBODY SUPERVISES",
    Condition.SILENT: "NO MACHINE ANSWERS, NOBODY SUPERVISES",
    Condition.ATTEMPT_SILENT: "NO MACHINE OF ITS ATTEMPT ANSWERS, NOBODY SUPERVISES",
    Condition.HANDING_OVER: "handing over to its machines",
    Condition.TRAINED: "trained, its results are not home yet",
    Condition.WINDING_UP: "trained, being wound up",
    Condition.NOT_WOUND_UP: "trained, not wound up",
    Condition.WAITING: "waiting for machines",
    Condition.WAITING_FOR_MORE: "waiting for more machines",
    Condition.STARTING: "starting",
    Condition.PREPARING: "preparing its machines",
    Condition.LEFT: "waiting, nobody supervises",
    Condition.FAILED_THERE: "its script has failed, nobody supervises",
    Condition.PREPARED: "prepared, nothing trains on it",
    Condition.HELD: "failed, machines held",
    Condition.KEPT: "succeeded, machines kept",
    Condition.ENDING: "ending its machines",
    Condition.NOT_TORN_DOWN: "not torn down",
    Condition.ENDED: "",
}
"""Of a job that is over, but for machines that stay up for its user, these come after its status."""
