"""How the job's state changes: with what was seen, and with what is about to be done."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from decimal import Decimal

from gpucloud.domain.checkpoint.manifest import Counts
from gpucloud.domain.job.quantities import span_of
from gpucloud.domain.job.spec import Job
from gpucloud.domain.node.launch import script_of
from gpucloud.domain.node.status import DONE, OUTPUT, UNTOLD, Outcome, Progress, Stop
from gpucloud.domain.state.state import (
    Attempt,
    ExitReason,
    InterruptionKind,
    JobState,
    JobStatus,
    Member,
    MissingOutput,
    Quarantine,
    Successor,
)
from gpucloud.domain.supervision.action import (
    Appoint,
    CloseAttempt,
    CoolDown,
    EndAttempt,
    Finish,
    Move,
    NoteInterruptions,
    ObeyOrder,
    OpenAttempt,
    QuarantineNodes,
    Replace,
)
from gpucloud.domain.supervision.capacity import cooled, with_distance
from gpucloud.domain.supervision.membership import is_broken, outcomes_of, progress_of, shown_of, timed
from gpucloud.domain.supervision.quarantine import why_replaced
from gpucloud.domain.supervision.snapshot import Homecoming, Snapshot, asked_of
from gpucloud.domain.supervision.strays import as_listed, resumed, stopped_at, tells_step
from gpucloud.domain.untrusted import in_one_line


def record(snapshot: Snapshot) -> JobState:
    """Return the state with what was seen written into it: nodes, steps, resumptions, the newest checkpoint."""
    state = _with_resumed(snapshot, with_steps(snapshot))
    nodes = as_listed(state, snapshot.group, snapshot.now).nodes
    settled = len(snapshot.group.counted) >= snapshot.group.size and all(
        interval.pool == state.pool for interval in replace(state, nodes=nodes).alive
    )
    pauses = state.drives_itself and snapshot.homecoming is not Homecoming.DONE  # it is written before results come
    holds = pauses or state.status.ended or state.attempt is not None
    return replace(
        state,
        message=state.message if holds else None,  # of a pause that is over
        nodes=nodes,
        left_usd_per_hour=Decimal(0) if settled else state.left_usd_per_hour,
        capacity_decision=snapshot.capacity_choice.capacity_decision if snapshot.capacity_choice is not None else None,
        enough_at=snapshot.enough_at,
        paid_until=snapshot.group.armed_until if snapshot.group.exists else None,
        checkpoint=snapshot.checkpoint or state.checkpoint,
    )


def obey_order(state: JobState, action: ObeyOrder) -> JobState:
    """Return the state that says which order was acted on last."""
    return replace(state, order_number=max(state.order_number, action.number))


def open_attempt(
    state: JobState, action: OpenAttempt, port: int, now: datetime, tree: str = "", job: Job | None = None
) -> JobState:
    """Return the state with the next attempt opened, which runs the job's script on that tree of its code."""
    members = tuple(Member(node_id=node_id, rank=rank) for rank, node_id in enumerate(action.node_ids))
    attempt = Attempt(number=action.number, members=members, port=port, started_at=now, tree=tree)
    if job is not None:
        attempt = replace(attempt, outputs=job.outputs, script=script_of(job))
    return replace(state, attempts=(*state.attempts, attempt))


def order_end(state: JobState, action: EndAttempt, now: datetime) -> JobState:
    """Return the state in which the open attempt is to end; the first reason stays, or the first that ends the job.

    What ends the job counts from when it was first wanted: so much time there is to obey. The message is of the reason
    that stands.
    """
    attempt, message = state.attempts[-1], state.message
    before = attempt.ending_reason
    if before is None or (before.retried and not action.reason.retried):
        attempt, message = replace(attempt, ending_reason=action.reason, ending_at=now), action.message
    elif before is action.reason:
        message = action.message or message
    killed_at = now if action.how is Stop.KILL else None
    attempt = replace(attempt, ordered=action.how, killed_at=attempt.killed_at or killed_at)
    return _with_attempt(replace(state, message=message), attempt)


def close_attempt(
    state: JobState,
    action: CloseAttempt,
    now: datetime,
    missing_outputs: tuple[MissingOutput, ...] = (),
    failure: str | None = None,
) -> JobState:
    """Return the state with the attempt closed, and the job ended too where its reason is not retried.

    `failure` is the exception of its script, in one line. What it committed unheard it has done.
    """
    last, counts = state.attempts[-1], state.checkpoint.counts if state.checkpoint is not None else Counts.STEPS
    attempt = replace(
        with_commit(state.attempts, last.saved_step, counts)[-1],
        members=tuple(replace(member, use=(), used_until=None) for member in last.members),
        total_steps=None if last.outdated and action.reason is not ExitReason.SUCCEEDED else last.total_steps,
        ended_at=now,
        reason=action.reason,
        missing_outputs=missing_outputs,
        unsaved=action.message if action.reason is ExitReason.SUCCEEDED or action.reason.retried else None,
    )
    waiting = replace(_with_attempt(state, attempt), status=JobStatus.WAITING, message=None)
    if action.reason.retried:
        return waiting
    said = state.message if action.reason is last.ending_reason else None
    message = action.message or said or (failure if action.reason.by_script else None)
    told = [line for line in (message, ran_before(last, action.reason)) if line is not None]
    return finish(waiting, Finish(reason=action.reason, message="; ".join(told) or None), now)


def ran_before(attempt: Attempt, reason: ExitReason) -> str | None:
    """Return what to say of a script that has ended its job though another was meant to run; None for other ends."""
    if not attempt.outdated or not (reason is ExitReason.SUCCEEDED or reason.by_script):
        return None
    return f"attempt {attempt.number} ran as it was started: what the last start changed has not run"


def last_steps_unsaved(attempt: Attempt, snapshot: Snapshot, *, saves_alone: bool) -> str | None:
    """Return what to say of a script that has come to its end without a save of its last state; None where it is saved.

    With gpucloud.resume only `run.done()` saves that; a script that says so has trained as far as it was to, whatever
    it had meant to. Of one that saves by itself its machine says so, which may have failed for it.
    """
    progress, saved = progress_of(attempt, snapshot), snapshot.saved
    kept = f"the newest checkpoint is that of {saved}" if saved is not None else "nothing is saved"
    why, reached = attempt.unsaved, attempt.last_step or 0
    if progress is not None and (saves_alone or progress.phase == DONE or progress.unsaved is not None):
        why, reached = progress.unsaved, max(progress.step, reached)
    if saves_alone:
        return f"its last checkpoint is not saved: {in_one_line(why)}; {kept}" if why is not None else None
    if why is not None:
        return f"its last step, {reached}, is not saved, as {in_one_line(why)}; {kept}"
    if progress is None or progress.phase in (OUTPUT, UNTOLD, DONE):
        return None
    step, total = max(progress.step, 0), progress.total_steps
    if saved is not None and saved.step >= step and (total is None or step >= total):
        return None
    of = f" of {total}" if total is not None else ""
    return f"its script ended with 0 at step {step}{of}, without run.done(): {kept}"


def with_commit(attempts: tuple[Attempt, ...], step: int | None, counts: Counts) -> tuple[Attempt, ...]:
    """Return the attempts, the last of which came at least as far as `step`, the newest that the store has.

    A script goes on saving when nobody hears it. What an attempt before had committed is none of the last one's work.
    Where `step` is a save, the steps that the last one told before it are none.
    """
    if not attempts or step is None:
        return attempts
    *before, last = attempts
    own = last if last.counts in (None, counts) else replace(last, first_step=None, last_step=None)
    saved = 0 if last.begun_anew else max((attempt.saved_step or 0 for attempt in before), default=0)
    if step <= max(saved, own.last_step or 0):
        return attempts
    first = own.first_step if own.first_step is not None else saved + 1
    return (*before, replace(own, first_step=first, last_step=step, counts=counts))


def note_interruptions(state: JobState, action: NoteInterruptions) -> JobState:
    """Return the state with the interruptions added: of what is gone or went unheard, with when training stopped."""
    gone = {interval.node_id for interval in state.nodes if interval.ended_at is not None}
    heard = {i.node_id for i in action.interruptions if i.kind is InterruptionKind.NOTICE} - gone
    new = (i if i.node_id in heard else replace(i, stopped_at=stopped_at(i, state)) for i in action.interruptions)
    return replace(state, interruptions=(*state.interruptions, *new))


def quarantine(state: JobState, action: QuarantineNodes, now: datetime) -> JobState:
    """Return the state in which the nodes are never used again; the first reason stays."""
    known = {one.node_id for one in state.quarantined}
    new = tuple(
        Quarantine(node_id=i, why=why, at=now, may_pass=i in action.may_pass)
        for i, why in action.nodes
        if i not in known
    )
    return replace(state, quarantined=(*state.quarantined, *new))


def give_up(state: JobState, action: Replace, snapshot: Snapshot) -> JobState:
    """Return the state that says why these machines are ended while the job goes on; the first reason stays."""
    given_up = {node_id: why_replaced(node_id, snapshot) for node_id in action.node_ids}
    nodes = (replace(one, given_up=one.given_up or given_up.get(one.node_id)) for one in state.nodes)
    return replace(state, nodes=tuple(nodes))


def cool_down(state: JobState, action: CoolDown, now: datetime) -> JobState:
    """Return the state in which the pool is left alone for a while; nothing of it takes over."""
    cooling = replace(state, cooldowns=cooled(state, action, now))
    taken_back = state.successor is not None and state.successor.pool == action.pool
    return dismiss(cooling) if taken_back else cooling


def appoint(state: JobState, action: Appoint, now: datetime) -> JobState:
    """Return the state in which machines of the offer are asked for beside those that work."""
    offer = action.offer
    return replace(state, successor=Successor(pool=offer.pool, cap_usd_per_hour=offer.cap_usd_per_hour, at=now))


def dismiss(state: JobState) -> JobState:
    """Return the state in which none are; some may live yet."""
    return replace(state, successor=None, left_usd_per_hour=state.dearest_usd_per_hour)


def take_over(state: JobState, now: datetime) -> JobState:
    """Return the state of a job whose machines are those that stood beside; the others may live yet."""
    successor = state.successor
    if successor is None:
        return state
    return replace(
        state,
        pool=successor.pool,
        cap_usd_per_hour=successor.cap_usd_per_hour,
        pool_at=now,
        successor=None,
        left_usd_per_hour=state.dearest_usd_per_hour,
    )


def move(state: JobState, action: Move, group: str | None, now: datetime) -> JobState:
    """Return the state of a job that turns to another pool; `group` is what it still has there."""
    offer = action.offer
    efa = tuple(sorted({*state.efa, offer.efa})) if group is not None else (offer.efa,)
    cap = offer.cap_usd_per_hour
    left = state.dearest_usd_per_hour if state.alive else Decimal(0)
    moved = replace(state, pool=offer.pool, cap_usd_per_hour=cap, pool_at=now, left_usd_per_hour=left)
    return replace(moved, group=group, efa=efa, gpu=offer.gpu, successor=None)


def finish(state: JobState, action: Finish, now: datetime) -> JobState:
    """Return the state of a job that is over; its machines may still have to be ended."""
    return replace(
        state,
        status=action.reason.status,
        exit_reason=action.reason,
        exit_code=action.reason.exit_code,
        message=action.message,
        ended_at=now,
    )


def pause(state: JobState, message: str, missing_outputs: tuple[MissingOutput, ...] | None = None) -> JobState:
    """Return the state of a job that its machines drive no more; what of its last attempt is lost if it never comes."""
    if missing_outputs is not None:
        state = _with_attempt(state, replace(state.attempts[-1], missing_outputs=missing_outputs, outputs_coming=True))
    return replace(state, message=message)


def left_behind(state: JobState, outputs: tuple[str, ...]) -> JobState:
    """Return the state of a job that ended between two attempts, in which all its outputs are missing.

    They are brought home from an attempt that no other follows; the last one was to be followed, or its machines went.
    """
    last = state.attempts[-1] if state.attempts else None
    if last is None or last.reason is None or not last.reason.retried or last.missing_outputs or last.outputs_came:
        return state
    was_to_go_on = "" if last.reason is ExitReason.LOST else ", which was to be followed by another one"
    why = f"{lost_with_machines(last)}{was_to_go_on}"
    asked = asked_of(state.attempts, outputs)
    missing = tuple(MissingOutput(path=path, why=why, attempt=last.number) for path in asked)
    return _with_attempt(state, replace(last, missing_outputs=missing))


def abandon(state: JobState, now: datetime, outputs: tuple[str, ...] = ()) -> JobState:
    """Return the state of a job that is given up as it stands, without a last save; its outputs are missing."""
    if state.attempt is None:
        return left_behind(finish(state, Finish(reason=ExitReason.STOPPED), now), outputs)
    why = f"{lost_with_machines(state.attempt)}, which was ended without a last save"
    asked = asked_of(state.attempts, outputs)
    missing = tuple(MissingOutput(path=path, why=why, attempt=state.attempt.number) for path in asked)
    return close_attempt(state, CloseAttempt(reason=ExitReason.STOPPED), now, missing)


def lost_with_machines(attempt: Attempt) -> str:
    """Return why outputs are missing that nobody brought home in time: they were there if the script had ended."""
    went = f"the machines of attempt {attempt.number}"
    if all(member.outcome is Outcome.DONE for member in attempt.members):
        return f"lost with {went}"
    return f"did not come home: whatever the script had written there by then went with {went}"


def reopen(state: JobState) -> JobState:
    """Return the state of an ended job that goes on: its attempts, money and checkpoints stay.

    What it ended for may be mended by now, in the job file, in the account or at the cloud: no refusal counts on.
    """
    return replace(
        state,
        status=JobStatus.WAITING,
        exit_reason=None,
        exit_code=None,
        message=None,
        ended_at=None,
        torn_down=False,
        successor=None,
        reopened_after=len(state.attempts),
        forgiven=len(state.quarantined),
        cooldowns=(),
        failed_bootstraps=(),
        had_budget_left=False,
    )


def _with_attempt(state: JobState, attempt: Attempt) -> JobState:
    return replace(state, attempts=(*state.attempts[:-1], attempt))


def since(state: JobState, snapshot: Snapshot, needed: int) -> JobState:
    """Return the state that says since when what has a time limit has been so: any process goes on from there."""
    short = 0 < len(snapshot.group.counted) < needed
    bare = snapshot.group.exists and snapshot.group.size > 0 and not snapshot.group.counted
    untold = {node.node.id: max(node.silent_for, node.mute_for) for node in snapshot.nodes}
    silent = {node_id: snapshot.now - length for node_id, length in untold.items() if length}
    heard = {node.node.id for node in snapshot.nodes if node.heard}
    words = {node.node.id: node.last_word_at for node in snapshot.nodes if node.last_word_at is not None}
    state = replace(
        state,
        short_at=(state.short_at or snapshot.now) if short else None,
        bare_at=(state.bare_at or snapshot.now) if bare else None,
        looked_at=snapshot.now,
        nodes=tuple(
            replace(
                interval,
                silent_at=silent.get(interval.node_id),
                last_word_at=words.get(interval.node_id, interval.last_word_at),
                unprepared_at=None if interval.node_id in heard else interval.unprepared_at,
            )
            for interval in state.nodes
        ),
    )
    attempt = state.attempt
    if attempt is None:
        return state
    outcomes = outcomes_of(attempt, snapshot)
    failed, broken = Outcome.FAILED in outcomes, is_broken(attempt, snapshot)
    return _with_attempt(
        state,
        replace(
            attempt,
            members=tuple(replace(m, outcome=how) for m, how in zip(attempt.members, outcomes, strict=True)),
            failed_at=(attempt.failed_at or snapshot.now) if failed else None,
            done_at=(attempt.done_at or snapshot.now) if set(outcomes) == {Outcome.DONE} else None,
            over_at=attempt.over_at or _over_at(attempt, snapshot),
            broken_at=(attempt.broken_at or snapshot.now) if broken else None,
            outputs_still_at=snapshot.outputs_still_at or attempt.outputs_still_at,
            unbrought_at=attempt.unbrought_at or (snapshot.now if snapshot.homecoming is Homecoming.FAILED else None),
        ),
    )


def _over_at(attempt: Attempt, snapshot: Snapshot) -> datetime | None:
    ids = {member.node_id for member in attempt.members}
    told = (node.status.attempt for node in snapshot.nodes if node.status is not None and node.node.id in ids)
    spans = [one.over_s for one in told if one and one.attempt == attempt.number and one.over_s is not None]
    return max(attempt.started_at, snapshot.now - span_of(min(spans))) if len(spans) == len(ids) else None


def with_steps(snapshot: Snapshot) -> JobState:
    """Return the state with how far the open attempt is, as its machine says."""
    state, attempt = snapshot.state, snapshot.state.attempt
    progress = progress_of(attempt, snapshot) if attempt is not None else None
    if attempt is None:
        return state
    attempt = replace(attempt, saved_step=_saved_step(attempt, progress, snapshot))
    if progress is None:
        return _with_attempt(state, attempt)
    last = attempt.last_step
    attempt = replace(
        as_told(attempt, progress),
        step_seconds=progress.step_seconds if progress.step_seconds is not None else attempt.step_seconds,
        longest_step_s=max(progress.longest_s or 0.0, attempt.longest_step_s or 0.0) or None,
        total_steps=progress.total_steps if progress.total_steps is not None else attempt.total_steps,
        unsaved=progress.unsaved,
    )
    if attempt.last_step != last:
        by_itself = progress.phase in (OUTPUT, UNTOLD)
        attempt = timed(with_distance(attempt, state, snapshot.now) if by_itself else attempt, snapshot.now)
    return replace(_with_attempt(state, attempt), status=JobStatus.RUNNING)


def _saved_step(attempt: Attempt, progress: Progress | None, snapshot: Snapshot) -> int | None:
    """Return the newest step that the attempt knows to be committed: after it began anew, none of before."""
    if progress is not None and progress.counter_drop is not None:
        return progress.committed_step
    told = progress.committed_step if progress is not None else None
    found = snapshot.checkpoint.step if snapshot.checkpoint is not None else None
    return max(attempt.saved_step or 0, told or 0, found or 0) or None


def as_told(attempt: Attempt, progress: Progress) -> Attempt:
    """Return the attempt with the steps, or the saves, that its script tells by now, and whether it began anew.

    Before its first save a script may have told steps; they are no saves.
    """
    before = attempt.last_step if (attempt.counts or Counts.STEPS) is progress.counts else None
    return replace(
        attempt,
        first_step=progress.first_step,
        last_step=max(progress.step, before or 0) if progress.step >= progress.first_step else before,
        counts=progress.counts,
        begun_anew=attempt.begun_anew or progress.counter_drop is not None,
    )


def _with_resumed(snapshot: Snapshot, state: JobState) -> JobState:
    """Add the script's own steps, and that training goes on after interruptions: a save does not tell since when."""
    attempt = state.attempt
    shown = shown_of(attempt, snapshot)[0] if attempt is not None else None
    if attempt is None or shown is None or not tells_step(shown):
        return state
    attempt = replace(attempt, printed_step=shown.step if shown.phase == OUTPUT else None)
    stops = tuple(stopped_at(one, state) for one in state.interruptions)
    known = resumed(state.interruptions, stops, attempt, shown, snapshot.now)
    return replace(_with_attempt(state, attempt), interruptions=known)
