"""`logs`: the output of a job's ranks, each line with where and when it was written."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import partial

from gpucloud.cli.render.output import LogWriter, Place, Since, Tail, log_writer
from gpucloud.cli.render.use import brief, condition_word, step_words
from gpucloud.cli.render.words import say_json, tell, with_short_ids
from gpucloud.cli.target import known_job, report_of
from gpucloud.domain.checkpoint.manifest import Counts
from gpucloud.domain.errors import GpucloudError, StoreError, UsageError
from gpucloud.domain.job.quantities import counted, format_moment, parse_span
from gpucloud.domain.node.output import DatedPiece
from gpucloud.domain.state.order import is_to_end
from gpucloud.domain.state.state import Attempt, JobState
from gpucloud.domain.untrusted import in_one_line
from gpucloud.usecases.job.jobs import Asker, Unsupervised
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.jobstore.records import BEFORE, LogPart, unheard_from
from gpucloud.usecases.jobstore.report import JobReport
from gpucloud.wiring import Gpucloud
from gpucloud.wiring.jobs import asker_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which output `logs` writes, and how: of one attempt, rank or node, since a time, each rank's last lines."""

    follow: bool = False
    attempt: int | None = None
    rank: int | None = None
    node: str | None = None
    tail: int | None = None
    since: str | None = None
    timestamps: bool = False
    as_json: bool = False


_QUIET = timedelta(seconds=30)
"""How long an attempt may print nothing before that is said."""


def logs(target: str | None, wanted: Wanted) -> int:
    """Write the output of a job's ranks, to its end with `follow`; return the exit code. UsageError without any."""
    cloud = Gpucloud()
    known = known_job(cloud, target)
    asker, read = asker_of(cloud, known), 0
    since = Since(since_time(wanted.since, asker.clock.now())) if wanted.since is not None else None
    state = asker.stored_state()
    ranks = Ranks(asker=asker, state=state, wanted=wanted)
    ranks.require_wanted()
    writer = log_writer(follow=wanted.follow, as_json=wanted.as_json, timestamps=wanted.timestamps, place=ranks.place)
    visit = partial(report_of, cloud, known, visits=True)
    shown = Shown(ranks=ranks, writer=writer, wanted=wanted, since=since, visit=visit)
    try:
        for part, piece in asker.output(
            attempt=wanted.attempt, rank=wanted.rank, follow=wanted.follow, caught_up=shown.caught_up
        ):
            read += len(piece.data)
            shown.take(part, piece)
        writer.end()
    finally:
        asker.bill_pull(read)
    left = shown.unsupervised
    is_alone = left is not None and ranks.has_wanted(left.state.attempt)
    if not shown.read_any:
        none = _no_output(ranks.newest_state(), wanted, is_alone=is_alone)
        if not wanted.follow or state.status.ended:
            raise none
        tell(none.message)  # it was followed to its end, as asked
    if left is not None and is_alone and not wanted.follow:
        tell(_unsupervised_line(ranks, left))
    _say_what_is_left_out(shown, since)
    return 0


def _unsupervised_line(ranks: Ranks, left: Unsupervised) -> str:
    """Return what to say of an open attempt's output that nobody fetches: it may be old, and the script far ahead."""
    asker, job, attempt = ranks.asker, left.state.job, left.state.attempt
    ends = _ends(asker, left.state)
    way = f"it is to end: gpucloud down {job} ends it" if ends else f"gpucloud train {job} goes on"
    if attempt is None:
        on = way if ends else f"it writes nothing more until `gpucloud train {job}` goes on"
        return f"nobody supervises {job}: {on}"
    if not ranks.has_wanted(attempt):
        return f"nobody supervises {job}: {way}"
    told = f"fetched until {format_moment(left.fetched_until, asker.clock.now())}: nobody supervises {job}"
    if asker.is_off(attempt, left.state):
        return f"{told}, and what it wrote since went with its machines; {way}"
    return f"{told}, so that what it wrote since is not here; {way}, and fetches it"


def _ends(asker: Asker, state: JobState) -> bool:
    """Whether the job is to end; as its state says where its order cannot be read."""
    with suppress(GpucloudError):
        return is_to_end(state, asker.order().end)
    return is_to_end(state, None)


@dataclass(slots=True)
class Ranks:
    """Which node each rank of an attempt is on, and how that is written before its lines."""

    asker: Asker
    state: JobState
    wanted: Wanted
    _of_node: dict[int, int] = field(default_factory=dict)
    _sought: set[int] = field(default_factory=set)
    _labels: dict[int, dict[int, str]] = field(default_factory=dict)

    def attempt(self, number: int) -> Attempt | None:
        """Return that attempt; one that has begun meanwhile is looked for."""
        found = self._attempt(number)
        if found is None and number not in self._sought:
            self._sought.add(number)
            self.state = self.asker.stored_state()
            found = self._attempt(number)
        return found

    def newest_state(self) -> JobState:
        """Return the state as it is now."""
        self.state = self.asker.stored_state()
        return self.state

    def node(self, part: LogPart) -> str | None:
        """Return the node of the rank, None where nobody knows."""
        attempt = self.attempt(part.attempt)
        if attempt is None:
            return None
        place = part.rank // self._each(attempt)
        return next((member.node_id for member in attempt.members if member.rank == place), None)

    def place(self, part: LogPart) -> Place:
        """Return where the part was written, with the words for it: none where one rank alone can have."""
        return Place(node=self.node(part), label=self._label(part))

    def require_wanted(self) -> None:
        """Raise UsageError for an attempt, a rank or a node that the job does not have, with those that it has."""
        attempts, job = self.state.attempts, self.state.job
        if self.wanted.attempt not in (None, BEFORE) and not self.wanted.follow:
            require_attempt(self.state, self.wanted.attempt)
        if self.wanted.rank is not None and attempts and not self.wanted.follow and not self._has(self.wanted.rank):
            last = max(map(self._ranks, attempts)) - 1
            others = f"its ranks were 0 to {last}" if last else "its only rank was 0"
            raise UsageError(
                f"{job} has no rank {self.wanted.rank}: {others}", hint=f"gpucloud logs {job} --rank {last}"
            )
        nodes = tuple(dict.fromkeys(m.node_id for attempt in attempts for m in attempt.members))
        if self.wanted.node is not None and nodes and not any(map(self._is_wanted, nodes)) and not self.wanted.follow:
            raise UsageError(f"no attempt of {job} ran on {self.wanted.node}", hint=f"one of {', '.join(nodes)}")

    def wants(self, part: LogPart) -> bool:
        """Whether the part is of the node that was asked for, if one was."""
        if self.wanted.node is None:
            return True
        node = self.node(part)
        return node is not None and self._is_wanted(node)

    def unfetched_line(self, part: LogPart) -> str | None:
        """Return that output of an ended attempt may not be whole, and since when: its machines went unheard."""
        attempt, is_all = self.attempt(part.attempt), self.wanted.rank is None and self.wanted.node is None
        if attempt is None or attempt.reason is None:
            return None
        members = {one.node_id for one in attempt.members} if is_all else {self.node(part)}
        at = unheard_from(self.state, attempt, members, self.asker.rules.limits.silent)
        if at is None:
            return None
        until = format_moment(at - timedelta(seconds=self.asker.flush_s), self.asker.clock.now())
        gone = "its machine is gone" if len(members) == 1 else "not all of its machines were heard to their end"
        return f"its output after {until} may not be whole: {gone}"

    def has_wanted(self, attempt: Attempt | None) -> bool:
        """Whether some output of the attempt is of what was asked for."""
        if attempt is None or self.wanted.attempt not in (None, attempt.number):
            return False
        if self.wanted.node is not None and not any(self._is_wanted(member.node_id) for member in attempt.members):
            return False
        return self.wanted.rank is None or self._had(attempt, self.wanted.rank)

    def _has(self, rank: int) -> bool:
        """Whether any attempt had the rank: the newest one that has it answers, so that few launches are read."""
        return rank >= 0 and any(self._had(one, rank) for one in reversed(self.state.attempts))

    def _had(self, attempt: Attempt, rank: int) -> bool:
        return rank < len(attempt.members) or rank < self._ranks(attempt)

    def _ranks(self, attempt: Attempt) -> int:
        return len(attempt.members) * self._each(attempt)

    def _is_wanted(self, node: str) -> bool:
        return self.wanted.node is not None and node.startswith(self.wanted.node)

    def _attempt(self, number: int) -> Attempt | None:
        return next((one for one in self.state.attempts if one.number == number), None)

    def _each(self, attempt: Attempt) -> int:
        """Return how many ranks a node of the attempt had: the job may have been given another number since."""
        if attempt.number not in self._of_node:
            self._of_node[attempt.number] = self.asker.ranks_of_a_node(attempt.number)
        return self._of_node[attempt.number]

    def _label(self, part: LogPart) -> str:
        if self.wanted.rank is not None or self.wanted.as_json:
            return ""
        labels = self._labels.get(part.attempt)
        if labels is None:
            labels = self._labels[part.attempt] = dict(self._labels_of(part.attempt))
        return labels.get(part.rank, "")

    def _labels_of(self, number: int) -> Iterator[tuple[int, str]]:
        """Yield ranks with their labels, all of one width; the node stands in them where there are several."""
        attempt = self.attempt(number)
        each = self._each(attempt) if attempt is not None else 1
        if attempt is None or len(attempt.members) * each == 1:
            return
        members = sorted(attempt.members, key=lambda member: member.rank)
        nodes = [member.node_id for member in members]
        if sys.stdout.isatty():
            nodes = [cell for (cell,) in with_short_ids([[node] for node in nodes])]
        width, last = max(map(len, nodes)), len(str(len(members) * each - 1))
        for node, member in zip(nodes, members, strict=True):
            where = f"{node:<{width}} " if len(members) > 1 else ""
            for rank in range(member.rank * each, (member.rank + 1) * each):
                yield rank, f"{where}rank {rank:<{last}} | "


@dataclass(slots=True)
class Shown:
    """Writes output piece by piece, with a line on standard error before each attempt's.

    Of what was kept before somebody asked, only the last lines where a tail is wanted.
    """

    ranks: Ranks
    writer: LogWriter
    wanted: Wanted
    since: Since | None = None
    visit: Callable[[], JobReport] | None = None
    """Asks its machines how it stands."""
    read_any: bool = False
    wrote_any: bool = False
    unsupervised: Unsupervised | None = None
    """How a job stood last that nobody sees to."""
    _attempt: int | None = None
    _printing: set[int] = field(default_factory=set)
    """The attempts of which any output came, whatever is left out of it."""
    _tail: Tail | None = None
    _is_new: bool = False
    _quiet_since: datetime | None = None
    _told_quiet: int | None = None
    """The attempt of which it was said that it prints nothing."""

    def __post_init__(self) -> None:
        if self.wanted.tail is not None:
            self._tail = Tail(self.wanted.tail)

    def take(self, part: LogPart, piece: DatedPiece) -> None:
        """Write what is wanted of the piece, or keep its last lines until all that there is has been read."""
        self._printing.add(part.attempt)
        if not self.ranks.wants(part):
            return
        self.read_any = True
        for data, at in self._dated(piece):
            left = self._since(part, data, at)
            if left and self._tail is not None:
                self._tail.take(part, left, at)
            elif left:
                self._write(part, left, at)

    def caught_up(self, unsupervised: Unsupervised | None) -> None:
        """Write the last lines; all that comes from now on is new. Say so where nothing has come yet.

        Say too, once, that nobody sees to the job which is followed.
        """
        tail, self._tail = self._tail, None
        for part, data, at in tail.left() if tail is not None else ():
            self._write(part, data, at)
        if self.wanted.follow and not self._is_new and not self.wrote_any and not self.ranks.state.status.ended:
            of_it = "nothing new" if self.read_any else f"no output{_of_whom(self.wanted)}"
            leaves = "Ctrl-C leaves" if unsupervised is not None else "Ctrl-C leaves, the job goes on"
            tell(f"{self.ranks.state.job} has {of_it} yet: following ({leaves})")
        if self.wanted.follow and unsupervised is not None and self.unsupervised is None:
            tell(_unsupervised_line(self.ranks, unsupervised))
        self._is_new, self.unsupervised = True, unsupervised
        if self.wanted.follow and unsupervised is None and self.visit is not None:
            self._tell_of_a_quiet_script(self.visit)

    def _tell_of_a_quiet_script(self, visit: Callable[[], JobReport]) -> None:
        """Say once of an attempt that has printed nothing for a while since when, and what its machines do."""
        now = self.ranks.asker.clock.now()
        self._quiet_since = self._quiet_since or now
        if now - self._quiet_since < _QUIET:
            return
        self._quiet_since = now
        attempt = self.ranks.newest_state().attempt
        if (
            attempt is None
            or attempt.number in {*self._printing, self._told_quiet}
            or now - attempt.started_at < _QUIET
        ):
            return
        if self.ranks.has_wanted(attempt):
            self._told_quiet = attempt.number
            with suppress(GpucloudError):
                tell(_quiet_line(attempt, self.wanted.rank, visit()))

    def _dated(self, piece: DatedPiece) -> Iterator[tuple[bytes, datetime | None]]:
        if self.since is not None or self.wanted.timestamps or self.wanted.as_json:
            return piece.stretches()
        return iter(((piece.data, None),))

    def _since(self, part: LogPart, data: bytes, at: datetime | None) -> bytes:
        if self.since is None:
            return data
        attempt = self.ranks.attempt(part.attempt)
        return self.since.left(part, data, at, began=attempt.started_at if attempt is not None else None)

    def _write(self, part: LogPart, data: bytes, at: datetime | None) -> None:
        if part.attempt != self._attempt:
            self.writer.end()
            if not self.wanted.as_json:
                tell(attempt_header(part.attempt, self.ranks.attempt(part.attempt)))
                if (unfetched := self.ranks.unfetched_line(part)) is not None:
                    tell(unfetched)
        self._attempt, self.wrote_any, self._quiet_since = part.attempt, True, None
        self.writer.write(part, data, at)


def _quiet_line(attempt: Attempt, rank: int | None, report: JobReport) -> str:
    """Return that nothing was printed by the attempt, or by the one rank whose output is read."""
    samples = [gpu for one in report.standing if one.status is not None for gpu in one.status.gpus]
    doing = [*step_words(report), *([brief(samples)] if brief(samples) else [])]
    since = format_moment(attempt.started_at, report.looked_at)
    who = f"attempt {attempt.number}" if rank is None else f"rank {rank} of attempt {attempt.number}"
    said = f"{who} has printed nothing since it began at {since}: {condition_word(report)}"
    return f"{', '.join([said, *doing])}; `gpucloud watch {report.job}` shows more"


def attempt_header(number: int, attempt: Attempt | None) -> str:
    """Return the line before an attempt's output: which it is, on how many machines, from where.

    A save is numbered when it is made: the one that was put back is the one before the attempt's first.
    """
    if number == BEFORE:
        return "── setup that failed ──"
    parts = [f"attempt {number}"]
    if attempt is not None:
        parts.append(counted(len(attempt.members), "node"))
        parts += ["began anew"] if attempt.begun_anew else _from_words(attempt)
    return f"── {', '.join(parts)} ──"


def _from_words(attempt: Attempt) -> list[str]:
    first, unit = attempt.first_step, attempt.counts or Counts.STEPS
    if first is None:
        return []
    if first <= 1:
        return ["from the beginning"]
    if unit is Counts.STEPS and attempt.printed_step is not None:  # it may print any of its steps first
        return [f"first step printed: {first}"]
    return [f"after {unit.named(first - 1)}" if unit is Counts.SAVES else f"from {unit.named(first)}"]


def require_attempt(state: JobState, number: int) -> None:
    """Raise UsageError unless the job has had that attempt."""
    if number not in [attempt.number for attempt in state.attempts]:
        last = f"its newest is {state.attempts[-1].number}" if state.attempts else "none has started yet"
        raise UsageError(f"{state.job} has no attempt {number}: {last}", hint=f"gpucloud status {state.job}")


def _no_output(state: JobState, wanted: Wanted, *, is_alone: bool) -> GpucloudError:
    """Return what to say where nothing was read; `is_alone`: of an attempt whose output nobody fetches."""
    of = _of_whom(wanted)
    if not state.attempts:
        why = "has ended before its script started" if state.status.ended else "has not started its script yet"
        return UsageError(f"{state.job} {why}: no output", hint=f"gpucloud status {state.job} says where it stands")
    if state.status.ended:
        hint = f"gpucloud status {state.job} says how it ended, gpucloud logs {state.job} --launch what was run"
        return UsageError(f"{state.job} has ended, and there is no output{of}", hint=hint)
    asked = next((one for one in state.attempts if one.number == wanted.attempt), None)
    if asked is not None and asked.reason is not None:
        hint = f"gpucloud logs {state.job} --attempt {asked.number} --launch says what was run"
        return UsageError(f"attempt {asked.number} of {state.job} has ended, and there is no output{of}", hint=hint)
    if is_alone:
        why = f"no output{of} of {state.job} was fetched before its supervisor went: what it has written is not here"
        return UsageError(why, hint=f"gpucloud train {state.job} goes on and fetches it, gpucloud status {state.job}")
    hint = f"gpucloud logs -f {state.job} waits for it, gpucloud status {state.job} says where the job stands"
    return UsageError(f"{state.job} has no output{of} yet", hint=hint)


def _of_whom(wanted: Wanted) -> str:
    of = "" if wanted.rank is None else f" of rank {wanted.rank}"
    return of if wanted.node is None else f"{of} of {wanted.node}"


def _say_what_is_left_out(shown: Shown, since: Since | None) -> None:
    if since is None:
        return
    if not shown.wrote_any:
        tell(f"no output since {since.at:%Y-%m-%d %H:%M:%S} UTC")
    if since.undated:
        tell(f"left out: {counted(since.undated, 'older line')} of no known time")


_OF_DAY = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)(?::([0-5]\d))?", re.ASCII)


def since_time(text: str, now: datetime) -> datetime:
    """Return the time that "10m", "18:40" (the last one, UTC) or a time of ISO 8601 means. UsageError."""
    text = text.strip()
    if (found := _OF_DAY.fullmatch(text)) is not None:
        hour, minute, second = (int(part or 0) for part in found.groups())
        at = now.replace(hour=hour, minute=minute, second=second, microsecond=0)
        return at if at <= now else at - timedelta(days=1)
    try:
        at = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text))
        return at.astimezone(timezone.utc) if at.tzinfo is not None else at.replace(tzinfo=timezone.utc)
    except (ValueError, OverflowError):
        pass
    try:
        return now - parse_span(text)
    except ValueError:
        hint = "--since 10m, --since 18:40 or --since 2026-11-24T18:40:00Z; UTC where no zone is named"
        raise UsageError(f"--since: {in_one_line(text[:40])!r} is no time", hint=hint) from None


def launches(target: str | None, *, attempt: int | None) -> int:
    """Write how each node of each attempt was launched, secrets left out; return the exit code."""
    cloud = Gpucloud()
    known = known_job(cloud, target)
    if attempt is not None:
        require_attempt(asker_of(cloud, known).stored_state(), attempt)
    for number, node, data in JobStore(cloud.store_of(known), known.name).records.launches(attempt):
        try:
            launch = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise StoreError(f"the launch of attempt {number} on node {node} is damaged: {error}") from error
        say_json({"attempt": number, "node": node, "launch": launch}, is_one_of_many=True)
    return 0
