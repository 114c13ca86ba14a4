"""What an action means to the person who looks on, in one line or none; and what a failed script said last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from gpucloud.domain.checkpoint.layouts import Additions, additions_of
from gpucloud.domain.checkpoint.manifest import Counts
from gpucloud.domain.job.quantities import format_moment, format_span, format_usd
from gpucloud.domain.job.spec import CheckpointDirectory, Market, OnNotice
from gpucloud.domain.market.policies import Mode
from gpucloud.domain.node.member import attempt_folder
from gpucloud.domain.node.output import cause, first_to_fail, port_was_taken, without_code_folder
from gpucloud.domain.node.status import OUTPUT, UNTOLD, Outcome, Stop
from gpucloud.domain.state.order import BudgetChange
from gpucloud.domain.state.state import (
    Attempt,
    CapacityDecision,
    ExitReason,
    Interruption,
    InterruptionKind,
    JobState,
    MissingOutput,
)
from gpucloud.domain.supervision.action import (
    Action,
    Appoint,
    Arm,
    BringHome,
    CloseAttempt,
    CoolDown,
    Dismiss,
    Done,
    Drill,
    EndAttempt,
    Finish,
    Inspect,
    Move,
    NoteInterruptions,
    ObeyOrder,
    OpenAttempt,
    Pause,
    Prepare,
    Provision,
    QuarantineNodes,
    Relieve,
    Replace,
    Resize,
    StayOn,
    TakeOver,
    TearDown,
    Tell,
    Wait,
)
from gpucloud.domain.supervision.membership import members_of, part_of, progress_of, unit_of
from gpucloud.domain.supervision.quarantine import may_have_done_more, undone_work, why_replaced
from gpucloud.domain.supervision.renewal import ended_words
from gpucloud.domain.supervision.snapshot import Limits, NodeSnapshot, Snapshot
from gpucloud.domain.supervision.transitions import ran_before, with_commit
from gpucloud.ports import Brought, Host, Shell
from gpucloud.usecases.jobstore.jobstore import JobStore

_LIMITS = Limits()


def tell_story(  # noqa: C901, PLR0911, PLR0912  (one flat match)
    action: Action,
    snapshot: Snapshot,
    directory: CheckpointDirectory | None = None,
    told_until: datetime | None = None,
    limits: Limits = _LIMITS,
) -> str | None:
    """Return the line, None when the action is not news; `directory` is of a script that saves by itself.

    `told_until` is until when the machines are paid as it was told last; None where this supervisor has told nothing.
    """
    match action:
        case Provision():
            owned = snapshot.state.pool.market is Market.OWNED
            return "nothing is rented: own hosts" if owned else "making the node group (size 0: costs nothing)"
        case Arm(until=until) if not is_noticeable(until, told_until or snapshot.group.armed_until):
            return None
        case Arm(until=until) if snapshot.state.pool.market is Market.OWNED:
            return f"taken until {format_moment(until, snapshot.now)}: then the job's processes end by themselves"
        case Arm(until=until):
            return f"paid until {format_moment(until, snapshot.now)}: then the machines shut themselves off"
        case ObeyOrder(changes=changes):
            return "; ".join(map(budget_line, changes)) or None
        case Resize(size=size):
            return _resized(size, snapshot)
        case CoolDown(pool=pool, code=code, message=message):
            return f"{pool}: {message} ({code}); it is excluded for a while"
        case Appoint(offer=offer):
            hourly = f"{format_usd(offer.usd_per_hour)} an hour a node"
            return f"asking for {offer.pool} as well, {hourly}; the attempt goes on meanwhile"
        case Dismiss():
            return "giving back the machines asked for as well" if snapshot.state.successor is not None else None
        case TakeOver():
            return f"{snapshot.state.successor.pool} takes over" if snapshot.state.successor is not None else None
        case Move(offer=offer):
            return f"turning to {offer.pool}, {format_usd(offer.usd_per_hour)} an hour a node"
        case Prepare(node_ids=node_ids):
            return _prepared(node_ids, snapshot)
        case OpenAttempt(number=number, node_ids=node_ids):
            added, lost = _added(snapshot, directory), _lost(snapshot)
            return f"attempt {number} starts {_from(snapshot)}on {', '.join(node_ids)}{added}{lost}"
        case NoteInterruptions(interruptions=interruptions):
            return "; ".join(_interrupted(i, snapshot, directory) for i in interruptions)
        case Inspect(node_ids=node_ids):
            return f"looking at the GPUs of {', '.join(node_ids)}"
        case QuarantineNodes(nodes=nodes):
            return "; ".join(f"{node_id} is not used any more: {why}" for node_id, why in nodes)
        case EndAttempt(how=how, reason=reason, message=message):
            does = _ending(snapshot, directory) if how is Stop.SAVE else "ending the attempt"
            waits = f"{_limit(action, limits)}{unreached(action, snapshot, limits)}"
            return f"{does}: {reason.value}{': ' + message if message else ''}{waits}"
        case CloseAttempt(reason=reason, message=message):
            return _closed(reason, snapshot) + (f"; {message}" if message and reason is ExitReason.SUCCEEDED else "")
        case Relieve(node_id=node_id):
            return f"asking for another machine in place of {node_id}"
        case Replace(node_ids=node_ids):
            return "; ".join(f"replacing {node_id}: {why_replaced(node_id, snapshot)}" for node_id in node_ids)
        case Drill(node_id=node_id):
            return f"drill: asking the cloud to take {node_id}"
        case Finish(reason=ExitReason.USER_ERROR):
            return f"the job ends: {ExitReason.USER_ERROR.value}"  # what failed is told with its last lines
        case Finish(reason=reason, message=message):
            return f"the job ends: {reason.value}{': ' + message if message else ''}"
        case Pause(message=message):
            return message
        case TearDown():
            rented = "ending every machine" if snapshot.state.alive else "removing what is left on the cloud"
            return "freeing every host" if snapshot.state.pool.market is Market.OWNED else rented
        case Tell() | BringHome() | StayOn() | Wait() | Done():
            return None


def is_noticeable(until: datetime, told: datetime | None) -> bool:
    """Whether somebody would want to know of the shut-off: it comes sooner, or so much later that it matters."""
    # What is charged moves it by seconds, and at a budget's end it is renewed every few of them: a time that was told
    # must not be too late by more than that.
    return told is None or told - until >= _SOONER or until - told >= _LATER


def unreached(action: EndAttempt, snapshot: Snapshot, limits: Limits) -> str:
    """Return which of the attempt's machines cannot hear that it is to end, and how long they are waited for."""
    attempt = snapshot.state.attempt
    members = {member.node_id for member in attempt.members} if attempt is not None else set()
    silent = [one.node.id for one in snapshot.nodes if one.node.id in members and one.silent_for >= limits.silent]
    if not silent or action.how is not Stop.SAVE:
        return ""
    waited = "" if action.reason.retried else f": waiting {format_span(limits.overdue)} for that at the most"
    return f"; {', '.join(silent)} {'does' if len(silent) == 1 else 'do'} not hear it{waited}"


def end_unheard(state: JobState, limits: Limits, now: datetime) -> str | None:
    """Return which machines do not hear that their attempt is to end, and until when they are waited for."""
    attempt = state.attempt
    if attempt is None or attempt.ending_at is None or not attempt.ends_for_good:
        return None
    members = {member.node_id for member in attempt.members}
    heard_at = now - limits.silent  # a late answer is no silence
    alive = [one for one in state.alive if one.node_id in members]
    silent = [one.node_id for one in alive if one.silent_at is not None and one.silent_at <= heard_at]
    if not silent:
        return None
    until = format_moment(attempt.ending_at + limits.overdue, now)
    do = "does" if len(silent) == 1 else "do"
    return f"{', '.join(silent)} {do} not hear of the end: waited for until {until} at the latest"


def stage_of_end(state: JobState, limits: Limits, now: datetime, *, has_outputs: bool = False) -> str:
    """Return what an ordered end has come to, and what it waits for; nothing where its supervisor has not heard it."""
    if state.status.ended:
        return ended_words(state, limits, now, has_outputs=has_outputs)
    attempt = state.attempt
    if attempt is None or not attempt.ends_for_good:
        return ""
    ends, after = f"attempt {attempt.number} is being ended", "; then its outputs are brought" if has_outputs else ""
    awaited = script_awaited(attempt, limits, now)
    return f"{ends}{f': {awaited}' if awaited else ''}{after}"


def script_awaited(attempt: Attempt, limits: Limits, now: datetime) -> str:
    """Return until when the script of an attempt that is to end may save and leave; nothing where it is killed."""
    if attempt.ordered is not Stop.SAVE or attempt.ending_at is None:
        return ""
    script, upload = (format_moment(attempt.ending_at + time, now) for time in (limits.save, limits.leave))
    then = f"; what it saved has until {upload} to reach the store" if limits.upload else ""
    return f"its script is waited for until {script} at the latest, then killed{then}"


def budget_line(change: BudgetChange) -> str:
    """Return from what to what the budget was changed, and by whom."""
    return f"budget: {format_usd(change.old_usd)} → {format_usd(change.new_usd)}, by {change.by}"


def decision_line(made: CapacityDecision, now: datetime | None) -> str:
    """Return what a job with a deadline runs on, since when, and why, by the sums of which moment."""
    then = "then" if made.decided_at == made.since else f"at {format_moment(made.decided_at, now)}"
    return f"{_MODES[Mode(made.mode)]} from {format_moment(made.since, now)}, decided {then} on {made.why}"


def missing_line(output: MissingOutput) -> str:
    """Return which output did not come home, or not whole, and what may have been meant."""
    return f"outputs: {output.path} {output.why}{f'; nearest: {output.nearest}' if output.nearest else ''}"


def brought_lines(brought: Brought) -> tuple[str, ...]:
    """Return what came home, and in one line each what of it has another name here, and what lay there before."""
    lines, kept = list(map(brought_line, brought.paths)), brought.set_aside
    for name, place in brought.renamed[:1]:
        more = f" and {len(brought.renamed) - 1} more likewise" if brought.renamed[1:] else ""
        lines.append(f"{name} came as {place}{more}: the disk here takes its name for another's")
    if kept:
        more = f" and {len(kept) - 1} more of that ending" if len(kept) > 1 else ""
        were = "file that lay there was" if len(kept) == 1 else "files that lay there were"
        lines.append(f"{len(kept)} {were} not written over: kept as {kept[0]}{more}")
    return tuple(lines)


def brought_line(path: str) -> str:
    """Return where an output came home to, and whether there is anything in it."""
    is_bare = (folder := Path(path)).is_dir() and not any(folder.iterdir())
    return f"brought home: {path}{', an empty folder: the script wrote nothing into it' if is_bare else ''}"


_SOONER, _LATER = timedelta(seconds=5), timedelta(minutes=1)
_MODES = {
    Mode.IDLE: "waiting",
    Mode.SPOT: "spot",
    Mode.ON_DEMAND: "on demand",
    Mode.BOTH: "on demand, spot asked for as well",
}


def silence(snapshot: Snapshot, limits: Limits) -> str:
    """Return the line for machines of which none answers: whether they or our line are down cannot be told apart."""
    until, attempt = snapshot.group.armed_until, snapshot.state.attempt
    told = f"no machine answers: {', '.join(node.id for node in snapshot.group.alive)}"
    if until is None:
        return told
    by, held = format_moment(until, snapshot.now), "taken" if snapshot.state.pool.market is Market.OWNED else "paid"
    runs = attempt is not None and attempt.ending_reason is None
    if runs and len(snapshot.group.alive) == 1 and until - snapshot.now > limits.alone:
        return f"{told}; {given_up(1, limits)}"
    return f"{told}; {f'the attempt there may go on until {by} at the latest' if runs else f'{held} until {by}'}"


def given_up(silent: int, limits: Limits) -> str:
    """Return for how long so many machines of an attempt are waited for that do not answer."""
    it, span = "it is" if silent == 1 else "each is", format_span(limits.alone)
    return f"{it} given up as soon as it is known to be dead, or after {span} in which nothing shows that it lives"


def answer_again(node_ids: Sequence[str]) -> str:
    """Return the line for machines that were silent, all at once, and of which these are heard again."""
    return f"{', '.join(node_ids)} {'answers' if len(node_ids) == 1 else 'answer'} again"


def _prepared(node_ids: tuple[str, ...], snapshot: Snapshot) -> str:
    """Return which machines are made ready; those that train since before this supervisor came are looked at alone.

    It is no news that one which does not answer is tried again, nor one whose attempt is about to end.
    """
    attempt, owner = snapshot.state.attempt, snapshot.state.owner
    is_older = attempt is not None and owner is not None and attempt.started_at < owner.since
    at_work = {member.node_id for member in attempt.members} if attempt is not None and is_older else set()
    new, training = ([one for one in node_ids if (one in at_work) is works] for works in (False, True))
    told = [f"preparing {', '.join(new)}"] if new else []
    silent = {node.node.id for node in snapshot.nodes if node.silent_for}
    ends = attempt is not None and attempt.ending_reason is not None
    checked = [] if ends else [one for one in training if one not in silent]
    told += [f"checking {', '.join(checked)}: what still trains there is not disturbed"] if checked else []
    return "; ".join(told)


def _ending(snapshot: Snapshot, directory: CheckpointDirectory | None) -> str:
    """Return how an attempt is ended in order: a script that saves by itself is asked by a signal alone."""
    attempt = snapshot.state.attempt
    told = part_of(attempt, members_of(attempt, snapshot)[0]) if attempt is not None else None
    if directory is not None and directory.on_notice is OnNotice.NONE:
        kept = told is None or told.progress is None or told.progress.committed_step is not None
        kept = kept or snapshot.saved is not None
        does = "once what its script has saved is kept" if kept else "whose script has saved nothing so far"
        return f"ending the attempt{'' if kept else ','} {does}"
    asks = "asking the script to save and leave"
    deaf = directory is None and told is not None and (told.shown is None or told.shown.phase == OUTPUT)
    return f"{asks}, though it has not called gpucloud.resume so far" if deaf else asks


def _limit(action: EndAttempt, limits: Limits) -> str:
    """Return how long a script has to leave in order; where a machine is interrupted, its notice says that."""
    if action.how is not Stop.SAVE or action.reason is ExitReason.INTERRUPTED:
        return ""
    if limits.upload:
        after = f"what it saved {format_span(limits.upload)} more to reach the store"
        return f"; the script has {format_span(limits.save)} for that, then it is killed, and {after}"
    return f"; waiting {format_span(limits.leave)} for that at the most, then it is killed"


def _resized(size: int, snapshot: Snapshot) -> str:
    state = snapshot.state
    if size < snapshot.group.size:
        back = ", ".join(node.id for node in snapshot.group.counted)
        none = f"asking for no machine now{f': giving back {back}' if back else ''}"
        return f"keeping {size} × {state.pool}" if size else none
    lacking = size - len(snapshot.group.counted)
    return f"asking for {lacking} × {state.successor.pool if state.successor is not None else state.pool}"


def _from(snapshot: Snapshot) -> str:
    """Return from which step an attempt after others goes on."""
    saved = snapshot.saved
    start = f"after {saved} " if saved is not None else "from the beginning "
    return start if snapshot.state.attempts else ""


def _added(snapshot: Snapshot, directory: CheckpointDirectory | None) -> str:
    """Return what the script gets beside where its checkpoint is put back."""
    additions = additions_of(directory)
    saved = snapshot.saved
    return f", with {additions}" if saved is not None and additions != Additions() else ""


def _lost(snapshot: Snapshot) -> str:
    """Return what the attempts before one have done in vain: without a checkpoint, all of the last one."""
    attempts = snapshot.state.attempts
    if not attempts or snapshot.saved is not None:
        return ""
    undone = undone_work(snapshot.state, attempts[-1], snapshot.now)
    if undone is None:
        return " (no checkpoint)"
    least = "at least " if may_have_done_more(snapshot.state, attempts[-1], snapshot.now) else ""
    return f" (no checkpoint): {least}{format_span(undone)} of work lost"


def _interrupted(interruption: Interruption, snapshot: Snapshot, directory: CheckpointDirectory | None) -> str:
    node_id, state, saved = interruption.node_id, snapshot.state, snapshot.saved
    ended_at = next((one.ended_at for one in state.nodes if one.node_id == node_id), None)
    at = f" at {format_moment(ended_at, snapshot.now)}" if ended_at is not None else ""
    match interruption.kind:
        case InterruptionKind.NOTICE if ended_at is not None:
            return f"{node_id} was interrupted{at}: it had a notice, and saved {saved}"
        case InterruptionKind.NOTICE:
            beside = "it has no part in an attempt" if interruption.attempt is None else None
            return f"{node_id} has a notice: {beside or _on_notice(snapshot, directory)}"
        case InterruptionKind.LOST if ended_at is not None and state.owner is not None and ended_at < state.owner.since:
            return f"{node_id} went{at}: nobody supervised then, and no word of a notice is left"
        case InterruptionKind.LOST:
            return f"{node_id} is gone without notice"
        case InterruptionKind.FROZEN:
            return f"{node_id} does not answer, and nothing else shows that it lives: it is given up"


def _on_notice(snapshot: Snapshot, directory: CheckpointDirectory | None) -> str:
    """Return what becomes of the work: a script that saves by itself is asked to save by a signal alone."""
    attempt = snapshot.state.attempt
    progress = progress_of(attempt, snapshot) if attempt is not None else None
    by_itself = progress is None or progress.phase in (OUTPUT, UNTOLD)
    if attempt is None or not by_itself or (directory is not None and directory.on_notice is not OnNotice.NONE):
        return "saving"
    if progress is not None and progress.committed_step is not None:
        return "what its script has saved is kept"
    # What it saves elsewhere by itself is seen by nobody.
    return "its script has saved nothing so far" if directory is not None else "no checkpoint of its script is known"


def _closed(reason: ExitReason, snapshot: Snapshot) -> str:
    saved = snapshot.saved
    counts = saved.counts if saved else Counts.STEPS
    attempt = with_commit(snapshot.state.attempts, saved.step if saved else None, counts)[-1]
    step = unit_of(attempt, saved).named(attempt.last_step) if attempt.last_step else ""
    lost = reason is not ExitReason.SUCCEEDED and (bool(step) or not reason.by_script)
    kept = f", checkpoint at {saved}" if saved else ", nothing saved" if lost else ""
    if step and reason is ExitReason.LOST and (saved is None or saved.step != attempt.last_step):
        return f"attempt {attempt.number} ended: {reason.value}, last heard at {step}{kept}"
    before = f"; {old}" if (old := ran_before(attempt, reason)) else ""
    return f"attempt {attempt.number} ended{f' at {step}' if step else ''}: {reason.value}{kept}{before}"


# What a failed script said: its exception in one line, and its output where nobody has seen that already.


_LINES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWords:
    """What the rank that failed first said.

    `shown` is the end of its output, None where it was shown as it came. `failure` is its exception in one line.
    """

    shown: str | None = None
    failure: str | None = None


def last_words(attempt: Attempt, snapshot: Snapshot, jobs: JobStore, shell: Shell) -> LastWords:
    """Return what the rank that failed first said last; rank 0's output was shown as it came.

    Where no script wrote anything, the launcher's own output tells why it could not start.
    """
    failed = {
        _rank_of(attempt, node): node for node in members_of(attempt, snapshot) if node and _failed(attempt, node)
    }
    if not failed:
        return LastWords()
    texts = {rank: _kept(jobs, attempt.number, rank) for rank in failed}
    rank = first_to_fail(texts)
    if not texts[rank]:
        node = failed[rank].node
        said = _launcher(shell.host(node), attempt.number)
        if port_was_taken(said):
            return LastWords(
                shown=f"{node.id}: another program took port {attempt.port}, at which the ranks were to meet"
            )
        return LastWords(shown=_tail(f"the launcher on {node.id}", said))
    shown = None if rank == 0 else _tail(f"rank {rank}", texts[rank])
    kept = snapshot.saved
    return LastWords(shown=shown, failure=cause(texts, rank, kept.step if kept is not None else 0))


def _failed(attempt: Attempt, node: NodeSnapshot) -> bool:
    part = part_of(attempt, node)
    return part is not None and part.outcome in (Outcome.BARRED, Outcome.FAILED)


def _rank_of(attempt: Attempt, node: NodeSnapshot) -> int:
    part = part_of(attempt, node)
    return part.failed_rank if part is not None and part.failed_rank is not None else 0


def _kept(jobs: JobStore, attempt: int, rank: int) -> str:
    parts = [part for part in jobs.records.log_parts(attempt) if part.rank == rank]
    return "".join(jobs.records.read_log(part).decode(errors="replace") for part in parts[-4:])


def _launcher(host: Host, attempt: int) -> str:
    done = host.run(("tail", "-n", str(_LINES), f"{attempt_folder(host.node.root, attempt)}/launcher.log"))
    return done.stdout.decode(errors="replace")


def _tail(who: str, text: str) -> str:
    lines = without_code_folder(text).rstrip().splitlines()[-_LINES:]
    return "\n".join([f"{who} failed:", *(f"  | {line}" for line in lines)])
