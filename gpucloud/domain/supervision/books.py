"""How the job's state changes: with what was seen, and with what is about to be done."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from decimal import Decimal

from gpucloud.domain.state import (
    Attempt,
    ExitReason,
    Interruption,
    JobState,
    JobStatus,
    Member,
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
    OpenAttempt,
    QuarantineNodes,
)
from gpucloud.domain.supervision.budget import used_up
from gpucloud.domain.supervision.capacity import cooled
from gpucloud.domain.supervision.lives import with_lives
from gpucloud.domain.supervision.membership import progress_of
from gpucloud.domain.supervision.pace import timed
from gpucloud.domain.supervision.quarantine import QUARANTINED
from gpucloud.domain.supervision.seen import Seen


def record(seen: Seen) -> JobState:
    """Return the state with what was seen written into it: nodes, steps, resumptions, the newest checkpoint."""
    state = _with_steps(seen)
    nodes = with_lives(state.nodes, seen.group.nodes)
    settled = len(seen.group.counted) >= seen.group.size and all(
        life.pool == state.pool for life in nodes if life.ended_at is None
    )
    return replace(
        state,
        nodes=nodes,
        left_usd_per_hour=Decimal(0) if settled else state.left_usd_per_hour,
        course=seen.heading.course if seen.heading is not None else None,
        enough_at=seen.enough_at,
        paid_until=seen.group.armed_until if seen.group.exists else None,
        checkpoint=seen.checkpoint or state.checkpoint,
    )


def open_attempt(state: JobState, action: OpenAttempt, port: int, now: datetime) -> JobState:
    """Return the state with the next attempt opened."""
    members = tuple(Member(node_id=node_id, rank=rank) for rank, node_id in enumerate(action.node_ids))
    attempt = Attempt(number=action.number, members=members, port=port, started_at=now)
    return replace(state, attempts=(*state.attempts, attempt))


def order_end(state: JobState, action: EndAttempt, now: datetime) -> JobState:
    """Return the state in which the open attempt is condemned; the first reason stays."""
    attempt = state.attempts[-1]
    return _with_attempt(
        replace(state, message=action.message or state.message),
        replace(
            attempt,
            condemned=attempt.condemned or action.reason,
            condemned_at=attempt.condemned_at or now,
            ordered=action.how,
        ),
    )


def close_attempt(state: JobState, action: CloseAttempt, now: datetime) -> JobState:
    """Return the state with the attempt closed, and the job ended too where its reason is not retried."""
    closed = _with_attempt(state, replace(state.attempts[-1], ended_at=now, reason=action.reason))
    waiting = replace(closed, status=JobStatus.WAITING, message=None)
    message = state.message if action.reason is state.attempts[-1].condemned else None
    return waiting if action.reason.retried else finish(waiting, Finish(reason=action.reason, message=message), now)


def note_interruptions(state: JobState, action: NoteInterruptions) -> JobState:
    """Return the state with the interruptions added."""
    return replace(state, interruptions=(*state.interruptions, *action.interruptions))


def quarantine(state: JobState, action: QuarantineNodes, now: datetime) -> JobState:
    """Return the state in which the nodes are never used again; the first reason stays."""
    known = {one.node_id for one in state.quarantined}
    new = tuple(Quarantine(node_id=i, why=why, at=now) for i, why in action.nodes if i not in known)
    return replace(state, quarantined=(*state.quarantined, *new))


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
        exit_code=action.exit_code if action.exit_code is not None else action.reason.exit_code,
        message=action.message or (used_up(state) if action.reason is ExitReason.BUDGET else None),
        ended_at=now,
    )


def abandon(state: JobState, now: datetime) -> JobState:
    """Return the state of a job that is given up as it stands, without a last save."""
    if state.attempt is not None:
        return close_attempt(state, CloseAttempt(reason=ExitReason.STOPPED), now)
    return finish(state, Finish(reason=ExitReason.STOPPED), now)


def reopen(state: JobState) -> JobState:
    """Return the state of an ended job that goes on: its attempts, money and checkpoints stay."""
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
        cooldowns=tuple(c for c in state.cooldowns if c.code != QUARANTINED),
    )


def _with_attempt(state: JobState, attempt: Attempt) -> JobState:
    return replace(state, attempts=(*state.attempts[:-1], attempt))


def _with_steps(seen: Seen) -> JobState:
    state, attempt = seen.state, seen.state.attempt
    progress = progress_of(attempt, seen) if attempt is not None else None
    if attempt is None:
        return state
    told = progress.committed_step if progress is not None else None
    found = seen.checkpoint.step if seen.checkpoint is not None else None
    attempt = replace(attempt, saved_step=max(attempt.saved_step or 0, told or 0, found or 0) or None)
    if progress is None:
        return _with_attempt(state, attempt)
    stepped = progress.step >= progress.first_step
    last = max(progress.step, attempt.last_step or 0) if stepped else attempt.last_step
    is_new = last != attempt.last_step
    attempt = replace(
        attempt,
        first_step=progress.first_step,
        last_step=last,
        step_seconds=progress.step_seconds if progress.step_seconds is not None else attempt.step_seconds,
        total_steps=progress.total_steps if progress.total_steps is not None else attempt.total_steps,
    )
    attempt = timed(attempt, seen.now) if is_new else attempt
    running = replace(_with_attempt(state, attempt), status=JobStatus.RUNNING)
    return replace(running, interruptions=_resumed(running, attempt, seen.now)) if stepped else running


def _resumed(state: JobState, attempt: Attempt, now: datetime) -> tuple[Interruption, ...]:
    return tuple(
        replace(i, resumed_at=now) if i.resumed_at is None and i.attempt < attempt.number else i
        for i in state.interruptions
    )
