"""What a user should know and do about a job: what it lacks, which run goes on or begins, which machines stay."""

from __future__ import annotations

from dataclasses import replace

from gpucloud.cli.render.bills import left_amount
from gpucloud.cli.render.use import lacked_room, noticed, unprepared
from gpucloud.domain.checkpoint.layouts import Additions, resume_advice
from gpucloud.domain.checkpoint.protection import none_came_home
from gpucloud.domain.job.quantities import counted, format_moment, format_most, format_span, format_usd
from gpucloud.domain.node.output import advice_for
from gpucloud.domain.state.order import OWN, is_finished
from gpucloud.domain.state.state import ExitReason, JobState, JobStatus, MissingOutput
from gpucloud.domain.untrusted import in_one_line
from gpucloud.usecases.jobstore.condition import ConditionKind, from_where
from gpucloud.usecases.jobstore.lease import winds_up
from gpucloud.usecases.jobstore.report import JobReport
from gpucloud.usecases.supervise.story import given_up, missing_line


def lacking(report: JobReport) -> list[str]:
    """Return what somebody should know, and do, about a job that nobody sees to, or that lacks its last part."""
    if report.status.ended:
        return _lacking_at_the_end(report)
    told = []
    if report.supervisor is None and report.last_supervisor is not None and report.written_at is not None:
        seen = f"{format_moment(report.written_at, report.looked_at)}{_ago(report)}"
        told.append(f"its supervisor, {report.last_supervisor}, was last seen at {seen}")
    told += [
        f"{one.node_id} has told its supervisor nothing since {format_moment(one.since, report.looked_at)}"
        for one in report.silent
    ]
    told += _waited_for(report)
    until = f" at {format_moment(report.paid_until, report.looked_at)}" if report.paid_until else ""
    ends, is_over = (
        ("are free again", "is free again") if report.owned else ("switch themselves off", "is off by itself")
    )
    match report.kind:
        case ConditionKind.HANDING_OVER | ConditionKind.TRAINED if report.can_be_handed_over:
            told.append(_handed_over(report))
        case ConditionKind.SILENT:
            told.append(f"nobody can tell whether its attempt goes on{_costs_meanwhile(report)}")
        case ConditionKind.UNSUPERVISED:
            told += [
                f"{node_id} goes at {format_moment(at, report.looked_at)}: its attempt ends then"
                for node_id, at in noticed(report)
            ]
            told.append(f"{_without_supervisor(report)} {ends}{until}")
        case ConditionKind.TRAINED if report.supervisor is None:
            does = "brings them home, and ends its machines" if report.to_come else "winds it up"
            told.append(f"{_train(report)} {does}")
            told += _until_lost(report)
        case ConditionKind.LEFT if report.nodes:
            failed = "its store was full" if lacked_room(report) else "its script has failed"
            how = f": {failed}" if report.has_failed_there else ""
            ended = f"attempt {report.attempts[-1].number} has ended{how}; " if report.ran_out else ""
            machines = counted(len(report.nodes), "machine")
            told.append(f"{ended}nothing trains on its {machines}; all {is_over}{until}")
        case ConditionKind.WAITING | ConditionKind.STARTING | ConditionKind.TRAINING:
            pass
        case ConditionKind.LEFT | ConditionKind.TRAINED | ConditionKind.HANDING_OVER:
            pass
        case ConditionKind.HELD | ConditionKind.KEPT | ConditionKind.ENDING | ConditionKind.ENDED:
            pass
    told += [*_ways_on(report), *_lost_file(report)] if report.supervisor is None else []
    return ["\n".join(map(in_one_line, told))] if told else []


def failure_text(report: JobReport) -> str | None:
    """Return the last line about a script that failed by itself: its exception, where to read on, how to go on."""
    if report.exit_reason is None or not report.exit_reason.by_script:
        return None
    said = f"{report.job}: failed" + (f": {report.message}" if report.message else " by its own error")
    advice = advice_for(report.message or "", resumed=len(report.attempts) > 1 and report.checkpoint is not None)
    given = " and ".join(report.resumption.conditions)
    same = "run the same command" if report.lost_file is None else _train(report)
    mend_it = "free some space in its store" if lacked_room(report) else "mend it"
    again = f"{mend_it} and {same}{f' with {given}' if given else ''}: {_once_mended(report)}"
    mend = [] if report.superseded else ["; ".join([again, *_lost_file(report)])]
    helps = [f"gpucloud logs {report.job}", *([advice] if advice else []), *mend]
    return " · ".join(in_one_line(part) for part in (said, *helps))


_SAYS_ITSELF = (ExitReason.SUCCEEDED, ExitReason.BUDGET, ExitReason.DEADLINE)
"""Ends after which the run does not go on, or whose message says how it does."""


def goes_on_text(report: JobReport) -> str | None:
    """Return how a run goes on that has ended; None where it does not, and where another line says it."""
    reason = report.exit_reason
    if reason is None or reason.by_script or reason in _SAYS_ITSELF or report.rehearses or report.superseded:
        return None
    train, start = report.resumption.command(_named(report)), from_where(report.checkpoint)
    on = f"{train} goes on in the same run, from {start}{_with_the_rest(report)}"
    return in_one_line("; ".join([on, *_lost_file(report)]))


def stay_text(report: JobReport) -> str | None:
    """Return the line about machines that stay up after the end: for what, until when, at what cost; None for none."""
    until = report.held_until or report.kept_until
    if until is None:
        return None
    one = len(report.nodes) == 1
    some = f"{len(report.nodes)} machine{' is' if one else 's are'}"
    awaits = "store with space in it" if lacked_room(report) else f"mended {report.awaits}"
    why = f"ready for a {awaits}" if report.held_until is not None else "kept, for a look,"
    return (
        f"{some} {why} until {format_moment(until, report.looked_at)},"
        f" {format_most(report.spend.promised_usd)} more at the most; {_down(report)} ends"
        f" {'it' if one else 'them'} now{_bare(report)}"
    )


def _bare(report: JobReport) -> str:
    """Return which kept machines have nothing to look at: the cloud started them in place of others."""
    members = {member.node_id for one in report.attempts[-1:] for member in one.members}
    bare = [node.id for node in report.nodes if node.id not in members]
    if report.kept_until is None or not members or not bare:
        return ""
    return f". The cloud started {', '.join(bare)} since: nothing of the job ran there, and there is nothing to look at"


def signature_lines(name: str | None) -> list[str]:
    """Return who else signed what is wanted of the job; nothing of one's own, as most are."""
    if name is None:
        why = "its newest order is signed by nobody you trust, or an older one was put back:"
        ways = "`gpucloud train` gives your own, `gpucloud down` ends it, both with `--adopt` where it is another's"
        return [f"{why} {ways}"]
    return [] if name == OWN else [f"its order is signed by {name}"]


def going_on_line(report: JobReport) -> str | None:
    """Return what a process finds that goes on with a job; None where nothing trains, or somebody sees to it."""
    told = (ConditionKind.UNSUPERVISED, ConditionKind.SILENT, ConditionKind.HANDING_OVER)
    if report.kind not in told or not report.attempts:
        return None
    attempt = report.attempts[-1]
    if report.kind is ConditionKind.SILENT:
        costs = _costs_meanwhile(report, named=len(_silent(report)) == len(report.nodes))
        return f"{report.job} goes on: attempt {attempt.number}{_unheard_since(report)}{costs}"
    reached = report.reached
    step = f" ({reached.counts.named(reached.step)})" if reached is not None else ""
    stands = "has lost a machine" if report.lost_machines else f"trains on {counted(len(report.nodes), 'machine')}"
    on = f"attempt {attempt.number} {stands}{step}"
    on = "; ".join([on, *_unheard(report)])
    if report.last_supervisor is None or report.written_at is None:
        return f"{report.job} goes on: {on}"
    seen = format_moment(report.written_at, report.looked_at)
    return f"{report.job} goes on: {on}; its supervisor, {report.last_supervisor}, was last seen at {seen}"


def found_line(state: JobState, supervisor: str | None, held: JobReport | None, *, ran: bool) -> str:
    """Return what a plan of a new run says first of the run that a start finds; `held` where machines wait for it.

    `ran`: it has succeeded with what a start would run now.
    """
    new = "this is the plan of a new run"
    if supervisor is not None and state.status.ended:
        return f"warning: {winds_up(state, supervisor)}: `gpucloud train` is refused until that is done; {new}"
    if supervisor is not None:
        return f"warning: {supervisor} supervises {state.job}: `gpucloud train` is refused; {new}"
    if ran:
        does = "tears down what is left of it and trains nothing (`--again` begins a new run)"
        return f"{state.job} has succeeded, and no edit was seen since: `gpucloud train` {does}; {new}"
    stands = f"has {state.status.value}" if state.status.ended else "is unfinished"
    return f"{state.job} {stands}: `gpucloud train` {_what_a_start_does(state, held)}; {new}"


def _what_a_start_does(state: JobState, held: JobReport | None) -> str:
    """Return what a start does with a run that nobody supervises: it saves, and ends, while nobody writes its state."""
    first = "tears down what is left of it first" if is_finished(state) and held is None else ""
    if first and not state.script_failed:
        return first
    if state.attempt is None:
        after = f" after {state.checkpoint}" if state.checkpoint is not None else ""
        return f"{f'{first}, and ' if first else ''}goes on with it{after}{_on_held(held)}"
    if state.attempt.done_at is not None:
        return "brings it to its end: its script is done"
    return "goes on with it, or brings it to its end where its script is done by then"


def _on_held(report: JobReport | None) -> str:
    if report is None or report.held_until is None:
        return ""
    until = format_moment(report.held_until, report.looked_at)
    return f" on the {counted(len(report.nodes), 'machine')} held for it until {until}"


def _ways_on(report: JobReport) -> list[str]:
    """Return which machines do not answer, and the two commands for a job that nobody sees to."""
    ways = f"{_train(report)} · end it: {_down(report)}"
    if report.ends and report.kind in (ConditionKind.UNSUPERVISED, ConditionKind.SILENT, ConditionKind.LEFT):
        return [f"it is to end, and nobody sees to that: {_down(report)} does"]
    if report.kind is ConditionKind.SILENT:
        return [f"look after it: {ways}"]
    told = _unheard(report, f": {_train(report)} prepares ")
    if report.kind is ConditionKind.LEFT and report.has_failed_there:
        start = from_where(report.checkpoint)
        told.append(f"see why: gpucloud logs {report.job}")
        first = "free some space in its store, then: " if lacked_room(report) else ""
        told.append(f"{first}{_train(report)} ends it as failed; given once more, it goes on from {start}")
    elif report.kind is ConditionKind.LEFT and report.ran_out:
        # Where all of its machines live, its script may have failed by its own error, and then it does not go on.
        on = f"go on from {from_where(report.checkpoint)}" if report.lost_machines else "look after it"
        told.append(f"{on}: {ways}")
    elif report.kind is ConditionKind.LEFT and report.attempts:
        told.append(f"go on from {from_where(report.checkpoint)}: {ways}")
    elif report.kind in (ConditionKind.UNSUPERVISED, ConditionKind.LEFT):
        told.append(f"go on: {ways}")
    return told


def _without_supervisor(report: JobReport) -> str:
    """Return what an attempt lacks that nobody supervises, up to what ends its machines."""
    if report.lost_machines:
        return "a machine of its attempt is off, and nobody starts training again; all others"
    return "nobody starts training again when a machine is interrupted now; all"


def _train(report: JobReport) -> str:
    """Return the command that goes on with the job."""
    return f"{report.from_there}gpucloud train {_named(report)}"


def _down(report: JobReport) -> str:
    """Return the command that ends it."""
    return f"{report.from_there}gpucloud down {report.job}"


def _named(report: JobReport) -> str:
    return report.job if report.lost_file is None else "FILE"


def _lost_file(report: JobReport) -> list[str]:
    return [report.lost_file] if report.lost_file is not None else []


def _waited_for(report: JobReport) -> list[str]:
    """Return for how long whoever supervises the job waits for machines that it does not hear."""
    attempt, silent = report.open_attempt, len(report.silent)
    if attempt is None or not silent or attempt.ending_reason is not None:
        return []
    if report.nobody_answers and len(report.nodes) > 1:  # only the cloud is believed: it may be the way to them
        until = f" until {format_moment(report.paid_until, report.looked_at)}" if report.paid_until else ""
        return [
            f"they may train all the same, and are waited for{until}; one of which the cloud says that it is gone is"
            f" given up, and one that answers without a word after {format_span(report.limits.alone)}"
        ]
    return [given_up(silent, report.limits)]


def is_past_deadline(report: JobReport) -> bool:
    """Whether its deadline is over: whoever sees to it ends it."""
    return report.deadline_at is not None and report.looked_at is not None and report.deadline_at <= report.looked_at


def _handed_over(report: JobReport) -> str:
    """Return when one of the job's machines takes it over, and for what."""
    is_over = report.ends or is_past_deadline(report) or report.kind is ConditionKind.TRAINED
    does = "see to its end" if is_over else "go on with it"
    most = f"which takes {format_span(report.limits.controller)} at the most"
    if launched := [o.launched_at for o in report.intervals if o.ended_at is None and not o.is_let_go]:
        most = f"until {format_moment(max(launched) + report.limits.controller, report.looked_at)} at the latest"
    when = f"once it has made itself fit, {most}" if report.fits_first else "within a minute"
    return f"its own machines {does}: one of them takes over {when}"


def _costs_meanwhile(report: JobReport, *, named: bool = False) -> str:
    """Return what machines of which none answers cost until they are off by themselves; all may be `named` before."""
    spend, one = report.spend, len(report.nodes) == 1
    costs = []
    if spend.usd_per_hour:
        costs.append(f"{format_usd(spend.usd_per_hour)} an hour")
    if report.paid_until is not None:
        costs.append(f"until {format_moment(report.paid_until, report.looked_at)} at the latest")
    if spend.promised_usd:
        costs.append(f"{format_most(spend.promised_usd)} more at the most")
    if not costs:
        return ""
    stays = f"{'is' if one else 'are'} {'taken' if report.owned else 'on'}"
    verb = ("costs" if one else "cost") if spend.usd_per_hour else stays
    who = ", and" if named else f"; its {'machine' if one else f'{len(report.nodes)} machines'}"
    return f"{who} {verb} {', '.join(costs)}"


def _until_lost(report: JobReport) -> list[str]:
    """Return until when results can be brought home from machines that nobody sees to."""
    if report.paid_until is None or report.drives_itself or not report.nodes:
        return []
    until = format_moment(report.paid_until, report.looked_at)
    verb = "is" if len(report.to_come) == 1 else "are"
    lost = f", and {', '.join(report.to_come)} {verb} lost" if report.to_come and not report.owned else ""
    then = "its hosts are free again" if report.owned else "its machines switch themselves off"
    return [f"until {until}: then {then}{lost}"]


def _lacking_at_the_end(report: JobReport) -> list[str]:
    if report.kind is not ConditionKind.ENDING or report.supervisor is not None:
        return []
    until = f" until {format_moment(report.paid_until, report.looked_at)}" if report.paid_until else ""
    alive = (
        [f"alive: {counted(len(report.nodes), 'machine')}, {'taken' if report.owned else 'paid'}{until}"]
        if report.nodes
        else []
    )
    does = _at_the_end(report)
    return ["\n".join([*alive, does])]


def _at_the_end(report: JobReport) -> str:
    """Return which command removes what is left of a job that is over, and which brings what is in its store."""
    removes = "" if report.has_stored_outputs else "removes what is left on the cloud"
    if report.home is not None:
        brings = "brings home what is in its store" if report.ever_outputs else ""
        return f"{_down(report)} {', and '.join(filter(None, [brings, removes]))}"
    copies = f"gpucloud cp -r {report.job}:@store/outputs FOLDER copies what is in its store: its job file is not here"
    down = [f"{_down(report)} {removes}"] if removes else []
    return "\n".join([*down, copies] if report.ever_outputs else down)


def _ago(report: JobReport) -> str:
    if report.looked_at is None or report.written_at is None:
        return ""
    return f", {format_span(report.looked_at - report.written_at)} ago"


def _unheard_since(report: JobReport) -> str:
    """Return the step that was told last, and that its machines have not answered since."""
    silent = _silent(report)
    machines = "its machine" if len(silent) == 1 else f"its {len(silent)} machines"
    reached = report.reached
    if reached is None or reached.at is None:
        step = f" at {reached.counts.named(reached.step)}" if reached is not None else ""
        return f"{step}; {machines} {'does' if len(silent) == 1 else 'do'} not answer"
    have = "has" if len(silent) == 1 else "have"
    at = format_moment(reached.at, report.looked_at)
    return f" at {reached.counts.named(reached.step)} ({at}); {machines} {have} not answered since"


def _unheard(report: JobReport, prepares: str = "") -> list[str]:
    """Return which machines do not answer, and which nobody has prepared for that; `prepares` is what does."""
    comes = report.fits_first and report.kind is ConditionKind.HANDING_OVER
    silent, fresh = _silent(report), [one for one in report.unanswered if one in unprepared(report) and not comes]
    told = [f"{', '.join(silent)} {'does' if len(silent) == 1 else 'do'} not answer"] if silent else []
    if fresh:
        are, them = ("is", "it") if len(fresh) == 1 else ("are", "them")
        does = f"{prepares}{them}" if prepares else ""
        told.append(f"{', '.join(fresh)} {are} not prepared, since nobody supervises{does}")
    return told


def _silent(report: JobReport) -> list[str]:
    """Return the machines that were asked and do not answer, though they were once prepared for that."""
    fresh = unprepared(report)
    return [one for one in report.unanswered if one not in fresh]


def _once_mended(report: JobReport) -> str:
    """Return from where the same command goes on once script or setup is mended, and with what money."""
    start = from_where(report.checkpoint)
    if report.held_until is not None:
        on = f"the {counted(len(report.nodes), 'machine')} held for it"
        return f"this run goes on from {start}, on {on}"
    anew = " (--again begins a new run)" if report.checkpoint is not None else ""
    return f"this run goes on from {start}{_with_the_rest(report)}{anew}"


def _with_the_rest(report: JobReport) -> str:
    """Return what money a run goes on with: what is left, or how little that is for a start."""
    left, needs = f"{left_amount(report.spend)} USD left of its budget", report.resumption
    if needs.as_last is not None:
        return f", if machines are offered that the {left} start{needs.otherwise}"
    return f", with the {left}" if needs.budget_usd is None else f": the {left} are too little for a start"


def anew_lines(report: JobReport) -> list[str]:
    """Return in one part which attempts began anew though a checkpoint was put back, and what helps; none for none.

    What the script gets by an order after the newest attempt's start has not been tried yet.
    """
    anew = [str(attempt.number) for attempt in report.attempts if attempt.begun_anew]
    if not anew:
        return []
    which = f"attempt {anew[0]}" if len(anew) == 1 else f"attempts {', '.join(anew)}"
    newest, ordered_at = report.attempts[-1], report.ordered_at
    tried = report.additions == Additions() or ordered_at is None or newest.started_at >= ordered_at
    advice = f"; {in_one_line(resume_advice(report.additions))}" if newest.begun_anew and tried else ""
    return [f"{which} began anew: the script did not take the checkpoint that was put back{advice}"]


def home_lines(report: JobReport) -> list[str]:
    """Return which outputs did not come home, and of a run that has ended, which did, and to where."""
    lines = missing_lines(report)
    if not report.status.ended or report.rehearses:
        return lines
    if not report.ever_outputs:
        if report.status is not JobStatus.SUCCEEDED or report.kind is not ConditionKind.ENDED:
            return lines
        return [*lines, none_came_home(report.saves, report.job, saved=report.checkpoint is not None)]
    lacking = {one.path for one in report.missing_outputs if brought_by(one, report) is None}
    came = [path for path in report.outputs if path not in lacking] if report.home else []
    are = "is" if len(came) == 1 else "are"
    return [*lines, *([f"outputs: {', '.join(came)} {are} home, in {report.home}"] if came else [])]


def cleared_lines(report: JobReport, *, anew: bool) -> list[str]:
    """Return that nothing is left of a run, and where its results are; once one is begun `anew`, it has that name."""
    its_own = report.job == report.name and report.base
    named = replace(report, job=f"{report.base}@{report.run}") if anew and its_own else report
    return [f"{report.name} is torn down", *map(in_one_line, home_lines(named))]


def missing_lines(report: JobReport) -> list[str]:
    """Return which outputs did not come home; of a path that a later attempt brought, that one's are here."""
    lines: dict[str, None] = {}
    for output in report.missing_outputs:
        if (by := brought_by(output, report)) is None:
            lines[missing_line(output)] = None
        else:
            lines[
                f"outputs: {output.path} is home, as attempt {by} left it; before that, {output.path} {output.why}"
            ] = None
    return list(lines)


def brought_by(output: MissingOutput, report: JobReport) -> int | None:
    """Return the last attempt, after the one that the output was lost of, that brought home what is at its path.

    Machines that drive the job bring it into the store: which is known once they have left it.
    """
    if report.drives_itself and not report.torn_down:
        return None
    lacking = {one.attempt for one in report.missing_outputs if one.path == output.path}
    last = report.attempts[-1] if report.attempts else None
    if output.attempt is None or last is None or last.reason is None or lacking & {None, last.number}:
        return None
    is_later = last.number > output.attempt and output.path in last.outputs
    return last.number if is_later and (last.outputs_came or not last.reason.retried) else None
