"""What a trial of resuming showed, as text for people and as JSON for programs."""

from __future__ import annotations

from typing import Any

from gpucloud.domain import codec
from gpucloud.domain.shown import in_one_line
from gpucloud.domain.trial import LossGap, Outcome, Verdict

_NAMED = 10


def verdict_text(verdict: Verdict) -> str:
    """Return what was found, with the parts of the state that differ and the first step whose loss does."""
    named = [f"  {in_one_line(part)}" for part in verdict.parts[:_NAMED]]
    rest = len(verdict.parts) - len(named)
    more = [f"  … and {rest} more"] if rest else []
    gap = [_gap_text(verdict.loss)] if verdict.loss is not None else []
    return "\n".join([_first_line(verdict), *named, *more, *gap])


def hint_of(verdict: Verdict) -> str | None:
    """Return what to do about it; None when all is well."""
    match verdict.outcome:
        case Outcome.DIFFERENT:
            return (
                "something that its steps depend on is not saved: give resume.init() every object with a state, and"
                " draw random numbers from torch, NumPy's and Python's own generators, not from one of the script's"
            )
        case Outcome.NOT_DETERMINISTIC:
            return "seed whatever is random before resume.init(), and call torch.use_deterministic_algorithms(True)"
        case Outcome.NOT_RESUMED:
            return "--verify-steps with fewer steps"
        case Outcome.EQUAL | Outcome.FAILED:
            return None


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """Return the same as an object; a loss that is no number is a string."""
    return {
        "outcome": verdict.outcome.value,
        "step": verdict.step,
        "resumed_from": verdict.resumed_from,
        "compared": verdict.compared,
        "different": list(verdict.parts),
        "loss": codec.plain(verdict.loss),
    }


def _first_line(verdict: Verdict) -> str:
    step, base, count = verdict.step, verdict.resumed_from, f"{len(verdict.parts)} of {verdict.compared} parts"
    same = f"all {verdict.compared} parts of the state at step {step} are the same to the bit"
    match verdict.outcome:
        case Outcome.EQUAL:
            return f"equal: killed and resumed from step {base}, {same}"
        case Outcome.DIFFERENT if not verdict.parts:
            return f"not equal: resumed from step {base}; {same}, but not every loss is"
        case Outcome.DIFFERENT:
            return f"not equal: resumed from step {base}; step {step} is the first saved one that differs, in {count}:"
        case Outcome.NOT_DETERMINISTIC:
            where = f"the state at step {step} differs in {count}:" if verdict.parts else f"{same}, but not every loss"
            return f"not deterministic: the runs differ before the resume from step {base} already; {where}"
        case Outcome.NOT_RESUMED:
            return f"not resumed: the script ended after step {step}, before it was killed"
        case Outcome.FAILED:
            return "nothing is proved: a run did not come to its end"


def _gap_text(gap: LossGap) -> str:
    calm, killed = ("none" if loss is None else repr(loss) for loss in (gap.calm, gap.killed))
    return f"the loss differs from step {gap.step} on: {calm} undisturbed, {killed} resumed (rank {gap.rank})"
