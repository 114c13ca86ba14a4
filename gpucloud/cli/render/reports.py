"""Jobs as text for people, and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

from gpucloud.cli.render.bills import charges_text, for_later, let_go_words, plain_amount, spend_json, spend_text
from gpucloud.cli.render.use import (
    condition_and_reason,
    may_come_words,
    outdated_words,
    step_words,
    unprepared,
    unsaved_words,
    use_json,
    use_rows,
)
from gpucloud.cli.render.ways import (
    anew_lines,
    brought_by,
    failure_text,
    goes_on_text,
    home_lines,
    is_past_deadline,
    lacking,
    signature_lines,
    stay_text,
)
from gpucloud.cli.render.words import as_argument, pool_json, quarantine_json, table
from gpucloud.domain import codec
from gpucloud.domain.checkpoint.layouts import Additions
from gpucloud.domain.checkpoint.manifest import Counts
from gpucloud.domain.job.quantities import counted, format_moment, format_span, span_of
from gpucloud.domain.node.node import Node
from gpucloud.domain.state.state import (
    Attempt,
    CapacityDecision,
    Cooldown,
    ExitReason,
    Interruption,
    JobStatus,
    UsageInterval,
)
from gpucloud.domain.supervision.capacity import dated
from gpucloud.domain.untrusted import in_one_line, set_off
from gpucloud.usecases.jobstore.condition import ConditionKind, in_short, may_tell, tells_steps, untold_words
from gpucloud.usecases.jobstore.report import JobReport
from gpucloud.usecases.supervise.story import decision_line


def report_text(report: JobReport) -> str:
    """Return a job's report: status, attempts, interruptions, machines and money."""
    failed = failure_text(report)
    parts = [in_one_line(_headline(report)), *signature_lines(report.signed_by)]
    parts += [in_one_line(unsaved)] if (unsaved := unsaved_words(report)) is not None else []
    parts += [*lacking(report), *_unproven(report)]
    if report.message and failed is None:
        parts.append(set_off(report.message))
    if home := home_lines(report):
        parts.append("\n".join(map(in_one_line, home)))
    parts += map(in_one_line, report.backoff)
    if (made := report.capacity_decision) is not None:
        warning = [dated(made.warning, made, report.looked_at)] if made.warning else []
        parts.append("\n".join(map(in_one_line, (decision_line(made, report.looked_at), *warning))))
    if report.deadline_at is not None and not report.status.ended:
        parts.append(_deadline_words(report, report.deadline_at))
    parts += _tables(report)
    parts.append(spend_text(report.spend, for_later(report)))
    parts.append(_nodes_text(report))
    if last := [line for line in (failed, goes_on_text(report), stay_text(report)) if line is not None]:
        parts.append("\n".join(last))
    return "\n\n".join(parts)


def _unproven(report: JobReport) -> list[str]:
    """Return that nothing but its script's exit code says that a job has succeeded, where that is so."""
    told = report.checkpoint is not None or any(one.last_step or tells_steps(one) for one in report.attempts)
    if report.status is not JobStatus.SUCCEEDED or told or not report.attempts:
        return []
    way = "`metrics: {step: …}` in the job file reads steps from what it prints"
    return [f"its script ended with 0 and told no step: nothing else shows that it trained; {way}"]


def _deadline_words(report: JobReport, deadline_at: datetime) -> str:
    """Return what happens at the deadline, and who sees to that: machines know of their paid time alone."""
    at = format_moment(deadline_at, report.looked_at)
    is_over, off = is_past_deadline(report), report.paid_until
    is_seen_to = report.supervisor is not None or report.can_be_handed_over
    if report.nodes and off is not None and off < deadline_at and not (is_seen_to and report.buys_time):
        machines = "hosts are free" if report.owned else "machines are off"
        return f"deadline {at}: its {machines} before, at {format_moment(off, report.looked_at)}"
    if is_seen_to:
        then = "then it ends, done or not, and saves first if its script does"
        return f"deadline {at}: {'it is over, and the job ends' if is_over else then}"
    if is_over:
        return f"its deadline was at {at}: without a later one, whoever supervises it next ends it"
    return f"deadline {at}: nobody is there who ends it then"


def _headline(report: JobReport) -> str:
    head = f"{report.job}: {condition_and_reason(report)}"
    steps = ", ".join(step_words(report))
    head += f", {steps}" if steps else ""
    return head + (f", supervised by {report.supervisor}" if report.supervisor else "")


def _tables(report: JobReport) -> list[str]:
    parts = []
    if report.attempts:
        rows = [
            ("attempt", "nodes", report.counts.value, "ended", "took"),
            *(_attempt_row(attempt, report) for attempt in report.attempts),
        ]
        parts.append(table(rows))
        parts += [*anew_lines(report), *outdated_words(report)]
    if report.interruptions:
        rows = [("interrupted", "how", "in attempt", "training again after")]
        rows += [_interruption_row(one, report) for one in report.interruptions]
        parts.append(table(rows))
    if report.checkpoint:
        added = f"; after it, the script gets {report.additions}" if report.additions != Additions() else ""
        saved_at, sum16 = report.checkpoint.saved_at, report.checkpoint.sha256[:16]
        at = f", saved at {format_moment(saved_at, report.looked_at)}" if saved_at is not None else ""
        parts.append(f"checkpoint at {report.checkpoint}{at}, manifest {sum16}{in_one_line(added)}")
    if report.charges:
        parts.append(charges_text(report.charges))
    if report.cooldowns:
        rows = [("excluded", "until (UTC)", "why")]
        rows += [_cooldown_row(one, report.looked_at) for one in report.cooldowns]
        parts.append(table(rows))
    if report.quarantined:
        rows = [("bad node", "since (UTC)", "why")]
        rows += [(q.node_id, _in_column(q.at, report.looked_at), q.why) for q in report.quarantined]
        parts.append(table(rows))
    if gone := _given_up(report):
        rows = [("given up", "until (UTC)", "why")]
        rows += [(one.node_id, _in_column(at, report.looked_at) if at else "-", why) for one, at, why in gone]
        parts.append(table(rows))
    if report.standing:
        parts.append(table(use_rows(report)))
    return parts


def _given_up(report: JobReport) -> list[tuple[UsageInterval, datetime | None, str]]:
    """Return the machines that were replaced while the job went on, until when it had each, and why.

    One that is bad for good stands with those.
    """
    bad = {one.node_id for one in report.quarantined}
    found = ((one, one.ended_at, one.given_up) for one in report.intervals if one.node_id not in bad)
    return [(one, at, in_one_line(why)) for one, at, why in found if why is not None]


def report_json(report: JobReport) -> dict[str, Any]:
    """Return a job as an object, with the same keys from every command; the handbook has them in commands.md.

    `use` is empty where nobody asked the nodes: only `status` of one job and `watch` do.
    """
    return {
        "job": as_argument(report.job),
        "name": report.name,
        "status": report.status.value,
        "condition": report.condition.value,
        "exit_reason": report.exit_reason.value if report.exit_reason else None,
        "message": report.message,
        "started_at": codec.plain(report.started_at),
        "ended_at": codec.plain(report.ended_at),
        "held_until": codec.plain(report.held_until),
        "kept_until": codec.plain(report.kept_until),
        "supervisor": report.supervisor,
        "signed_by": report.signed_by,
        "attempts": [_attempt_json(attempt, report) for attempt in report.attempts],
        "interruptions": [_interruption_json(i) for i in report.interruptions],
        **_last_json(report),
        "last_step_at": codec.plain(report.reached.at if report.reached is not None else None),
        "missing_outputs": [
            {**codec.plain(output), "brought_by": brought_by(output, report)} for output in report.missing_outputs
        ],
        "results": home_lines(report),
        "checkpoint": codec.plain(report.checkpoint),
        "unsaved": unsaved_words(report),
        "resume_args": list(report.additions.words),
        "resume_variables": dict(report.additions.variables),
        "spend": spend_json(report.spend),
        "paid_until": codec.plain(report.paid_until),
        "deadline_at": codec.plain(report.deadline_at),
        "capacity_decision": _decision_json(report.capacity_decision),
        "nodes": [_node_json(node, report) for node in report.nodes],
        "excluded": [_cooldown_json(cooldown) for cooldown in report.cooldowns],
        "quarantined": [quarantine_json(one) for one in report.quarantined],
        "given_up": [{"node": one.node_id, "until": codec.plain(at), "why": why} for one, at, why in _given_up(report)],
        "let_go": [{"node": one.node_id, "until": codec.plain(one.let_go_until)} for one in _let_go(report)],
        "backoff": list(report.backoff),
        "use": use_json(report),
    }


def newest_first(reports: Sequence[JobReport]) -> list[JobReport]:
    """Return the jobs by the time of their first order, the newest first."""
    return sorted(reports, key=lambda r: (r.started_at is not None, r.started_at), reverse=True)


def jobs_text(reports: Sequence[JobReport], unread: Sequence[str] = ()) -> str:
    """Return one line a job, times in UTC; `unread` are known jobs that could not be read."""
    if not reports and not unread:
        return "no jobs yet"
    rows = [("job", "status", "started (UTC)", "ended", "step", "machines", "spent")]
    rows += [
        (
            r.job,
            condition_and_reason(r),
            f"{r.started_at:%m-%d %H:%M}" if r.started_at else "-",
            f"{r.ended_at:%m-%d %H:%M}" if r.ended_at else "-",
            _step_cell(r),
            f"{len(r.nodes)}{f' (+{len(unseen)} unseen)' if (unseen := _let_go(r)) else ''}",
            f"{plain_amount(r.spend.spent_usd)} of {plain_amount(r.spend.budget_usd)} USD",
        )
        for r in reports
    ]
    rows += [(job, "unknown: it cannot be read", "-", "-", "-", "-", "-") for job in unread]
    return table(rows, ("started (UTC)", "ended"))


def _step_cell(report: JobReport) -> str:
    """Return the newest step that counts, when a node told it if not just now, and whether nothing is saved."""
    reached = report.reached
    unsaved = f", {in_short(words)}" if (words := unsaved_words(report)) is not None else ""
    if reached is None:
        return f"-{unsaved}"
    step = str(reached.step) if reached.counts is Counts.STEPS else reached.counts.named(reached.step)
    return (f"{step} ({reached.at:%H:%M:%S})" if reached.at is not None else step) + unsaved


def _decision_json(made: CapacityDecision | None) -> dict[str, Any] | None:
    if made is None:
        return None
    return {
        "mode": made.mode,
        "since": codec.plain(made.since),
        "decided_at": codec.plain(made.decided_at),
        "why": made.why,
        "warning": made.warning,
    }


def _attempt_json(attempt: Attempt, report: JobReport) -> dict[str, Any]:
    """Return an attempt's object; one whose results come home has ended with its script."""
    home = attempt.reason is None and report.kind is ConditionKind.TRAINED
    is_over = attempt.reason is not None or (home and report.over_at is not None)
    unit = report.unit_of(attempt)
    return {
        "number": attempt.number,
        "nodes": len(attempt.members),
        "reason": attempt.reason.value if attempt.reason else None,
        **_of_unit(unit, "first", attempt.first_step),
        **_of_unit(unit, "last", attempt.last_step),
        **_of_unit(unit, "kept_to", report.kept_to(attempt)),
        "began_anew": attempt.begun_anew,
        "outdated": attempt.outdated,
        "started_at": codec.plain(attempt.started_at),
        "ended_at": codec.plain(_worked_until(attempt, report) if is_over else None),
    }


def _last_json(report: JobReport) -> dict[str, int | None]:
    reached = report.reached
    return _of_unit(Counts.STEPS, "last", None) if reached is None else _of_unit(reached.counts, "last", reached.step)


def _of_unit(counts: Counts, name: str, number: int | None) -> dict[str, int | None]:
    """Return a number below the key of its unit, as `last_step` or `last_save`, and None below that of the other."""
    return {f"{name}_step": None, f"{name}_save": None, f"{name}_{counts.value.removesuffix('s')}": number}


def _interruption_json(interruption: Interruption) -> dict[str, Any]:
    return {
        "node": interruption.node_id,
        "kind": interruption.kind.value,
        "attempt": interruption.attempt,
        "stopped_at": codec.plain(interruption.stopped_at),
        "noticed_at": codec.plain(interruption.noticed_at),
        "resumed_at": codec.plain(interruption.resumed_at),
    }


def _node_json(node: Node, report: JobReport) -> dict[str, Any]:
    since = next((one.since for one in report.silent if one.node_id == node.id), None)
    return {
        "id": node.id,
        **pool_json(node.pool),
        "state": node.state.value,
        "launched_at": codec.plain(node.launched_at),
        "silent_since": codec.plain(since),
        "prepared": node.id not in unprepared(report),
    }


def _cooldown_json(cooldown: Cooldown) -> dict[str, Any]:
    return {
        **pool_json(cooldown.pool),
        "until": codec.plain(cooldown.until),
        "fault": cooldown.fault.value,
        "code": cooldown.code,
        "message": cooldown.message,
    }


def _attempt_row(attempt: Attempt, report: JobReport) -> tuple[str, ...]:
    """Return an attempt's cells."""
    until = _worked_until(attempt, report)
    more = " or more" if _worked_on_unheard(attempt, until, report) else ""
    steps = f"{attempt.first_step}–{attempt.last_step}{more}{_kept_words(attempt, report)}"
    if attempt.last_step is None:
        steps = "none"
    elif (unit := report.unit_of(attempt)) is not report.counts:
        steps = f"{unit.value} {steps}"
    reason = attempt.reason.value if attempt.reason else _open_word(report)
    unheard = report.is_unheard or (report.died_unheard and report.kind is not ConditionKind.TRAINED)
    if attempt.reason is None and unheard and report.told_at is not None:
        reason = f"unheard since {format_moment(report.told_at, report.looked_at, seconds=False)}"
        off = f", its {'hosts are free' if report.owned else 'machines are off'}"
        reason += off if report.died_unheard else ""
    return str(attempt.number), str(len(attempt.members)), steps, reason, _took(attempt, until, report)


def _took(attempt: Attempt, until: datetime, report: JobReport) -> str:
    """Return how long the attempt worked: a bound, where nobody heard its machines to their end, or hears them now.

    So of machines that came back: all of them know that it is over, and not all since when.
    """
    first = attempt.members[0].node_id
    told = next((one.last_word_at for one in report.intervals if one.node_id == first), None)
    heard = told or (report.told_at if attempt.reason is None else None)
    is_open, died = attempt.reason is None, report.died_unheard and report.kind is not ConditionKind.TRAINED
    if is_open and heard is not None and (report.is_unheard or (died and not _gone(attempt, report))):
        return f"at least {format_span(max(timedelta(0), heard - attempt.started_at))}"
    over_at = report.over_at if is_open else attempt.over_at
    unseen = over_at is None and (died or report.ran_out if is_open else attempt.reason is ExitReason.LOST)
    came_back = unseen and all(one.outcome is not None for one in attempt.members)
    most = came_back or (unseen and heard is not None and until - heard > report.limits.silent)
    return f"{'at most ' if most else ''}{format_span(until - attempt.started_at)}"


def _kept_words(attempt: Attempt, report: JobReport) -> str:
    """Return up to where the attempt's steps are kept, where later ones had to make some of them again."""
    kept_to = report.kept_to(attempt)
    if kept_to is None:
        return ""
    return f", kept to {kept_to}" if kept_to >= (attempt.first_step or 0) else ", none kept"


def _open_word(report: JobReport) -> str:
    """Return how the open attempt stands."""
    if report.kind is ConditionKind.TRAINED:
        return "trained"
    return "its ranks have ended" if report.ran_out else "running"


def _worked_until(attempt: Attempt, report: JobReport) -> datetime:
    """Return when the attempt's script ended, or now.

    Whenever that was seen: its nodes know, and it worked no longer than the first of its machines to go.
    """
    went = [i.stopped_at for i in report.interruptions if i.attempt == attempt.number and i.stopped_at is not None]
    silent = [at for at in went if attempt.reason is ExitReason.LOST]
    over_at = attempt.over_at if attempt.reason else report.over_at
    ended = over_at or attempt.ended_at or report.looked_at or datetime.now(timezone.utc)
    return max(min([ended, *_gone(attempt, report), *silent]), attempt.started_at)


def _gone(attempt: Attempt, report: JobReport) -> list[datetime]:
    """Return when those of its machines ended of which that is known."""
    members = {member.node_id for member in attempt.members}
    return [one.ended_at for one in report.intervals if one.node_id in members and one.ended_at is not None]


def _worked_on_unheard(attempt: Attempt, until: datetime, report: JobReport) -> bool:
    """Whether steps of the attempt are unknown: rank 0's machine went, and nobody had heard it for some of them."""
    is_gone = (
        report.ran_out and report.progress is None if attempt.reason is None else attempt.reason is ExitReason.LOST
    )
    if not is_gone or attempt.last_step_at is None or report.kept_to(attempt) is None:
        return False
    return until - attempt.last_step_at > report.limits.silent + 2 * span_of(attempt.pace_s or 0.0)


def _interruption_row(interruption: Interruption, report: JobReport) -> tuple[str, ...]:
    """Return an interruption's cells; of a script that tells no steps, the start of the next attempt is known."""
    number, attempts = interruption.attempt, report.attempts
    later = next((one for one in attempts if number is not None and one.number > number), None)
    again = "-"
    if interruption.resumed_at is not None:
        again = format_span(interruption.resumed_at - (interruption.stopped_at or interruption.noticed_at))
    elif later is not None:
        again = _untold_again(interruption, later, report)
    attempt = str(interruption.attempt) if interruption.attempt is not None else "none"
    return interruption.node_id, interruption.kind.value, attempt, again


def _untold_again(interruption: Interruption, later: Attempt, report: JobReport) -> str:
    """Return how the attempt after an interruption stands that has told no step: while it is open, one may come."""
    now, attempts = report.looked_at or datetime.now(timezone.utc), report.attempts
    gone = report.died_unheard or report.is_unheard or report.ran_out
    if later.reason is None and not gone and may_tell(later, attempts, now):
        return untold_words(later, attempts, now)
    tells, by_saves = any(map(tells_steps, attempts)), later.last_step is not None and not tells_steps(later)
    told = ", told no step" if tells else ", tells no steps"
    if by_saves:
        told = "" if tells else ", its saves alone tell how far it is"
    stopped = interruption.stopped_at or interruption.noticed_at
    return f"started after {format_span(later.started_at - stopped)}{told}"


def _cooldown_row(cooldown: Cooldown, now: datetime | None) -> tuple[str, ...]:
    return str(cooldown.pool), _in_column(cooldown.until, now), f"{cooldown.message} ({cooldown.code})"


def _in_column(at: datetime, now: datetime | None) -> str:
    """Return the moment for a column whose head says that it is UTC."""
    return format_moment(at, now).removesuffix(" UTC")


def _let_go(report: JobReport) -> list[UsageInterval]:
    return [one for one in report.intervals if one.is_let_go]


def _nodes_text(report: JobReport) -> str:
    """Return which machines live, and beside them which may."""
    let_go = let_go_words(report.intervals, report.looked_at, report.spend.let_go_usd)
    return "\n".join(filter(None, [_alive_text(report) if report.nodes or not let_go else "", let_go]))


def _alive_text(report: JobReport) -> str:
    if not report.nodes:
        return "; ".join(["no machines are alive", *may_come_words(report)])
    until = ""
    if report.paid_until is not None and report.spend.off_at is None:  # else it is told with the money, just above
        until = f", {'taken' if report.owned else 'paid'} until {format_moment(report.paid_until, report.looked_at)}"
    alive = f"{counted(len(report.nodes), 'machine')}{until}: {', '.join(node.id for node in report.nodes)}"
    return in_one_line(alive)
