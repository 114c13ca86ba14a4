"""How a job's machines and GPUs are used, as rows for people and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from gpucloud.cli.render.bills import Ends, money_line, to_go_words
from gpucloud.domain import codec
from gpucloud.domain.checkpoint.manifest import Counts
from gpucloud.domain.job.quantities import format_moment, format_span, span_of
from gpucloud.domain.node.hardware import GpuSample, HostSample
from gpucloud.domain.node.node import Notice
from gpucloud.domain.node.output import store_was_full
from gpucloud.domain.node.status import DONE, OUTPUT, UNTOLD, Outcome, Progress, RunState
from gpucloud.domain.node.use import GpuSpan, Span
from gpucloud.domain.state.state import Attempt, ExitReason
from gpucloud.domain.supervision.membership import patience, time_to_go
from gpucloud.domain.untrusted import in_one_line, set_off
from gpucloud.usecases.jobstore.condition import (
    WORDS,
    Condition,
    ConditionKind,
    Saves,
    in_short,
    nothing_saved,
    saved_words,
    untold_words,
)
from gpucloud.usecases.jobstore.report import JobReport
from gpucloud.usecases.supervise.story import script_awaited
from gpucloud.usecases.supervise.usage import NodeHistory

Rows = list[tuple[str, ...]]

_UNKNOWN = "-"
_TRAINS = (ConditionKind.TRAINING, ConditionKind.UNSUPERVISED, ConditionKind.SILENT, ConditionKind.HANDING_OVER)
_FULL = "its store was full"


def unprepared(report: JobReport) -> tuple[str, ...]:
    """Return its machines that tell nothing yet: nobody has made them ready for attempts, nor have they themselves.

    What the cloud starts in place of another while nobody supervises stays so until somebody does.
    """
    ready = {one.node_id for one in report.standing if one.status is not None}
    ready |= {member.node_id for attempt in report.attempts for member in attempt.members}
    fresh = {interval.node_id for interval in report.intervals if not interval.prepared} - ready
    return tuple(node.id for node in report.nodes if node.id in fresh)


def use_rows(report: JobReport) -> Rows:
    """Return a row for each GPU, and one for each machine; only the head when no node was asked."""
    rows: Rows = [("node", "what", "use", "memory", "temperature", "power", "remarks")]
    for node in report.standing:
        status = node.status
        if status is None:
            waits = "is being prepared" if report.supervisor is not None else "not prepared: nobody supervises"
            waits = "makes itself fit" if report.fits_first and report.can_be_handed_over else waits
            silent = waits if node.node_id in unprepared(report) else "does not answer"
            rows.append((node.node_id, silent, *[""] * 5))
            continue
        rows += [(node.node_id, *_gpu_cells(gpu)) for gpu in status.gpus]
        if status.host is not None:
            rows.append((node.node_id, *_host_cells(status.host)))
        if status.unhealthy is not None:
            rows.append((node.node_id, f"UNHEALTHY: {status.unhealthy}", *[""] * 5))
        if status.notice is not None:
            rows.append((node.node_id, notice_words(status.notice), *[""] * 5))
    return rows


def notice_words(notice: Notice) -> str:
    """Return that the cloud takes the machine, and when."""
    return f"notice: goes at {format_moment(notice.at, notice.at)}"


def noticed(report: JobReport) -> list[tuple[str, datetime]]:
    """Return the machines of its open attempt that have a notice, and when each goes, the first first."""
    members = {member.node_id for member in report.open_attempt.members} if report.open_attempt is not None else set()
    told = [
        (one.node_id, one.status.notice.at)
        for one in report.standing
        if one.node_id in members and one.status is not None and one.status.notice is not None
    ]
    return sorted(told, key=lambda one: one[1])


def _ended_parts(report: JobReport, attempt: Attempt) -> list[str]:
    """Return the machines on which the attempt has ended, undone: it comes to no last step, though others may run."""
    members = {member.node_id for member in attempt.members}
    asked = ((one.node_id, one.status.attempt) for one in report.standing if one.status is not None)
    told = [(node_id, part) for node_id, part in asked if part is not None and part.attempt == attempt.number]
    over = [node_id for node_id, part in told if part.state is RunState.EXITED and part.outcome is not Outcome.DONE]
    return [node_id for node_id in over if node_id in members]


def use_json(report: JobReport) -> list[dict[str, Any]]:
    """Return what every asked node said: newest sample of each GPU and of the machine."""
    return [
        {
            "node": node.node_id,
            "answers": node.status is not None,
            "prepared": node.node_id not in unprepared(report),
            "gpus": codec.plain(node.status.gpus) if node.status else [],
            "host": codec.plain(node.status.host) if node.status else None,
            "unhealthy": node.status.unhealthy if node.status else None,
            "goes_at": codec.plain(node.status.notice.at) if node.status and node.status.notice else None,
        }
        for node in report.standing
    ]


def headline(report: JobReport) -> str:
    """Return status, step, speed, loss and money in two lines; between, why it ended, what it runs, what may come."""
    why = [*([set_off(report.message)] if report.message else []), *outdated_words(report), *may_come_words(report)]
    return "\n".join([f"{report.job}: {', '.join(_state(report))}", *why, f"spent {money_line(report.spend)}"])


def brief(gpus: Sequence[GpuSample]) -> str:
    """Return one node's GPUs in a few words: mean use, highest temperature, power in all; empty without GPUs."""
    uses = [gpu.use for gpu in gpus if gpu.use is not None]
    if not uses:
        return ""
    hottest = max((gpu.temperature for gpu in gpus if gpu.temperature is not None), default=None)
    watts = [gpu.power for gpu in gpus if gpu.power is not None]
    parts = [f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''} {sum(uses) / len(uses):.0f} %"]
    parts += [f"{hottest} °C"] if hottest is not None else []
    parts += [f"{sum(watts):.0f} W"] if watts else []
    return ", ".join(parts)


def history_rows(history: Sequence[NodeHistory]) -> Rows:
    """Return a row for each GPU of each node and attempt, and one for the machine; means over all that is kept."""
    rows: Rows = [("attempt", "node", "what", "for", "use", "most memory", "hottest", "mean power", "energy")]
    for node in history:
        seconds = sum(span.seconds for span in node.spans)
        start = (str(node.attempt), node.node_id)
        long = format_span(span_of(seconds))
        for index in sorted({gpu.index for span in node.spans for gpu in span.gpus}):
            rows.append((*start, f"GPU {index}", long, *_gpu_history(node.spans, index)))
        rows.append((*start, "machine", long, *_host_history(node.spans)))
    return rows


def history_json(history: Sequence[NodeHistory]) -> list[dict[str, Any]]:
    """Return every span that is kept, by attempt and node."""
    return [{"attempt": n.attempt, "node": n.node_id, "spans": codec.plain(n.spans)} for n in history]


def condition_word(report: JobReport) -> str:
    """Return how a job stands in a few words: what goes on, and whether anybody sees to it; how it ended."""
    condition = report.condition
    word = WORDS[condition]
    match condition:
        case Condition.ENDING | Condition.NOT_TORN_DOWN | Condition.IN_STORE | Condition.ENDED:
            return ", ".join([report.status.value, *([word] if word else [])])
        case Condition.TRAINING:
            return word + _silent_words(report)
        case Condition.ENDING_ATTEMPT:
            return word + _why_ending(report) + _silent_words(report)
        case Condition.ENDING_UNHEARD:
            return word + _why_ending(report)
        case Condition.FAILED_THERE if lacked_room(report):
            return f"{_FULL}, nobody supervises"
        case _:
            return word


def _why_ending(report: JobReport) -> str:
    attempt = report.open_attempt
    return ending_words(attempt.ending_reason) if attempt is not None else ""


def ending_words(reason: ExitReason | None) -> str:
    """Return for what an attempt is being ended, behind that it is."""
    return f" ({reason.value})" if reason is not None else ""


def _silent_words(report: JobReport) -> str:
    """Return how many machines of an attempt do not answer whoever supervises it; empty where all do."""
    attempt, silent = report.open_attempt, len(report.silent)
    return f", {silent} of {len(attempt.members)} silent" if attempt is not None and silent else ""


def condition_and_reason(report: JobReport) -> str:
    """Return how a job stands, and why it ended where its status does not say so: `failed (budget)`."""
    reason = report.exit_reason
    why = f" ({reason.value})" if reason is not None and reason.value != report.status.value else ""
    why = f" ({_FULL})" if reason is not None and lacked_room(report) else why
    return f"{condition_word(report)}{why}"


def lacked_room(report: JobReport) -> bool:
    """Whether its script has failed, or ended, unsaved because its store was full: there is nothing to mend in it."""
    if report.exit_reason is not None:
        return report.exit_reason.by_script and store_was_full(report.message or "")
    unsaved = report.progress.unsaved if report.progress is not None and report.has_failed_there else None
    return unsaved is not None and store_was_full(f"its last checkpoint is not saved: {unsaved}")


def step_words(report: JobReport) -> list[str]:
    """Return step, pace and time to go as the nodes say now, else how old they are, or that none was told so far.

    Nothing without an open attempt.
    """
    reached, progress = report.reached, report.progress
    attempt = report.open_attempt
    if report.status.ended or attempt is None:
        return []
    if reached is None:
        runs = report.kind in (ConditionKind.TRAINING, ConditionKind.UNSUPERVISED) and not report.is_unheard
        return [untold_words(attempt, report.attempts, report.looked_at or attempt.started_at)] if runs else []
    if reached.is_saved:
        return [f"{reached} (checkpoint{_age(report)})"]
    if reached.at is not None:
        return [f"{reached} as of {format_moment(reached.at, report.looked_at)}"]
    step = f"{reached}{_age(report)}"
    if progress is None:
        return [step]
    if over := _ended_parts(report, attempt):
        return [step, f"attempt {attempt.number} has ended on {', '.join(over)}"]
    if report.ends and report.kind is not ConditionKind.UNSUPERVISED:  # whatever its pace, its last step is not reached
        now = report.looked_at or attempt.started_at
        awaited = script_awaited(attempt, report.limits, now) if report.supervisor is not None else ""
        return [step, *([awaited] if awaited else [])]
    step_s = progress.step_seconds if progress.phase != DONE else None
    pace = [f"{1 / step_s:.3g} steps/s"] if step_s else []
    watched = report.supervisor is not None  # nobody else ends what hangs
    limit = patience(progress, report.attempts, report.limits) if watched else None
    pace = stalled_words(progress.stalled_for, limit) or phase_words(progress) or pace
    return [step, *pace, *to_go_words(time_to_go(progress), report.spend, _ends_alone(report))]


def _age(report: JobReport) -> str:
    """Return how long ago a script saved of which only its saves tell how far it is; empty of any other."""
    saved, reached, now = report.checkpoint, report.reached, report.looked_at
    if saved is None or saved.saved_at is None or now is None or reached is None or not _tells_saves(report):
        return ""
    is_it = (saved.counts, saved.step) == (reached.counts, reached.step)
    return f", saved {format_span(max(timedelta(0), now - saved.saved_at))} ago" if is_it else ""


def _tells_saves(report: JobReport) -> bool:
    """Whether how far it is is known from its saves alone."""
    reached, phase = report.reached, report.progress.phase if report.progress is not None else None
    return reached is not None and (reached.is_saved or reached.counts is Counts.SAVES or phase == UNTOLD)


def _ends_alone(report: JobReport) -> Ends:
    """Return what ends an attempt that nobody supervises, and that none of its machines takes over."""
    until, now = report.paid_until, report.looked_at
    if report.kind is not ConditionKind.UNSUPERVISED or until is None or now is None:
        return ()
    off = "hosts are free again" if report.owned else "machines switch themselves off"
    ends = [(until, off, "paid time is over")]
    ends += [(at, f"machine {node_id} goes", f"machine {node_id} goes now") for node_id, at in noticed(report)]
    return [(max(timedelta(0), at - now), comes, over) for at, comes, over in ends]


def unsaved_words(report: JobReport) -> str | None:
    """Return that nothing is saved of a job that trains; None of any other. What `checkpoint: none` means, is known."""
    attempt, now = report.open_attempt, report.looked_at
    if attempt is None or report.saves is None or report.kind not in _TRAINS:
        return None
    work = report.attempts, report.progress, report.checkpoint, now or attempt.started_at
    saves = Saves(policy=report.saves, since=report.ordered_at)
    words = nothing_saved(saves, *work, heard=report.first_part is not None)
    ends_unsaved = report.supervisor is None and (report.lost_machines or bool(_ended_parts(report, attempt)))
    return in_short(words) if words is not None and ends_unsaved else words


def outdated_words(report: JobReport) -> list[str]:
    """Return that the open attempt runs what was there before the last start; nothing of any other, or once it died."""
    attempt = report.open_attempt
    if attempt is None or not attempt.outdated or report.ran_out or report.died_unheard:
        return []
    if report.kind is ConditionKind.TRAINED:
        return [f"attempt {attempt.number} has trained as it was started: what the last start changed has not run"]
    changed = "what the last start changed"
    later = f"{changed} has not run" if attempt.ends_for_good or report.ends else f"the next one runs {changed}"
    return [f"attempt {attempt.number} runs as it was started: {later}"]


def may_come_words(report: JobReport) -> list[str]:
    """Return that the cloud may start machines though nobody sees to the job; nothing where it was asked for none."""
    off_at = report.spend.off_at
    if report.nodes or report.supervisor is not None or off_at is None:
        return []
    until = format_moment(off_at, report.looked_at)
    takes_back = f"{report.from_there}gpucloud down {report.job} takes that back"
    return [f"machines that were asked for may still come, paid until {until}: {takes_back}"]


def phase_words(progress: Progress) -> list[str]:
    """Return the phase that a script reports in which no steps are expected; nothing of one that steps."""
    steps = progress.phase in {"start", "train", OUTPUT, UNTOLD, DONE}
    return [] if steps else [f"phase {in_one_line(progress.phase)}"]


def stalled_words(span: timedelta | None, limit: timedelta | None) -> list[str]:
    """Return for how long a script makes no step, and how long is taken for a hang; nothing while steps come.

    It stands in place of its pace and of when its last step would come.
    """
    hung = f" ({format_span(limit)} is taken for a hang)" if limit is not None else ""
    return [f"no step for {format_span(span)}{hung}"] if span is not None else []


def printed_words(numbers: tuple[tuple[str, float], ...]) -> list[str]:
    """Return numbers that the script prints, as short as they can be read."""
    return [f"{in_one_line(name)} {value:.6g}" for name, value in numbers]


def _state(report: JobReport) -> list[str]:
    parts = [condition_word(report)]
    if report.attempts and not report.exit_reason:
        parts.append(f"attempt {report.attempts[-1].number}")
    progress = None if report.ran_out else report.progress
    parts += step_words(report)
    is_told = report.open_attempt is not None and _tells_saves(report)
    saved = unsaved_words(report) or (saved_words(progress, report.checkpoint) if not is_told else None)
    parts += [saved] if saved is not None else []
    if progress is not None:
        if progress.waiting_share is not None:
            parts.append(f"{progress.waiting_share:.0%} waiting for data")
        if progress.loss is not None:
            parts.append(f"loss {progress.loss:.4f}")
    parts += printed_words(report.printed)
    return parts


def _gpu_cells(gpu: GpuSample) -> tuple[str, ...]:
    power = _with(gpu.power, "W", places=0)
    limit = f" of {gpu.power_limit:.0f}" if gpu.power is not None and gpu.power_limit is not None else ""
    errors = (f"{gpu.ecc_uncorrected} uncorrected memory errors",) if gpu.ecc_uncorrected else ()
    return (
        f"GPU {gpu.index}",
        _with(gpu.use, "%"),
        _memory(gpu.memory_used_mib, gpu.memory_mib),
        _with(gpu.temperature, "°C"),
        power.replace(" W", f"{limit} W"),
        ", ".join((*(reason.replace("_", " ") for reason in gpu.slowdowns), *errors)),
    )


def _host_cells(host: HostSample) -> tuple[str, ...]:
    free = f"{host.disk_free_mib / 1024:.0f} GiB of disk free"
    return ("machine", _with(host.cpu, "%"), _memory(host.memory_used_mib, host.memory_mib), "", "", free)


def _gpu_history(spans: Sequence[Span], index: int) -> tuple[str, ...]:
    own = [(span.seconds, gpu) for span in spans for gpu in span.gpus if gpu.index == index]
    fullest = max((gpu for _, gpu in own), key=lambda gpu: gpu.memory_used_mib or 0)
    watts = _mean([(seconds, gpu.power) for seconds, gpu in own])
    kwh = sum(seconds * (gpu.power or 0) for seconds, gpu in own) / 3_600_000
    return (
        _with(_mean([(seconds, gpu.use) for seconds, gpu in own]), "%", places=0),
        _memory(fullest.memory_used_mib, fullest.memory_mib),
        _with(_hottest([gpu for _, gpu in own]), "°C"),
        _with(watts, "W", places=0),
        f"{kwh:.3g} kWh" if watts is not None else _UNKNOWN,
    )


def _host_history(spans: Sequence[Span]) -> tuple[str, ...]:
    hosts = [(span.seconds, span.host) for span in spans if span.host is not None]
    if not hosts:
        return ("", "", "", "", "")
    fullest = max((host for _, host in hosts), key=lambda host: host.memory_used_mib)
    cpu = _mean([(seconds, host.cpu) for seconds, host in hosts])
    return (_with(cpu, "%", places=0), _memory(fullest.memory_used_mib, fullest.memory_mib), "", "", "")


def _hottest(gpus: list[GpuSpan]) -> int | None:
    return max((gpu.temperature for gpu in gpus if gpu.temperature is not None), default=None)


def _mean(weighed: list[tuple[float, float | None]]) -> float | None:
    known = [(seconds, value) for seconds, value in weighed if value is not None]
    total = sum(seconds for seconds, _ in known)
    return sum(seconds * value for seconds, value in known) / total if total else None


def _memory(used: int | None, total: int | None) -> str:
    if used is None:
        return _UNKNOWN
    return f"{used / 1024:.1f} of {total / 1024:.0f} GiB" if total else f"{used / 1024:.1f} GiB"


def _with(value: float | None, unit: str, *, places: int | None = None) -> str:
    if value is None:
        return _UNKNOWN
    return f"{value:.{places}f} {unit}" if places is not None else f"{value:g} {unit}"
