"""`keep`: puts a directory back, runs the script beside it, and commits its whole checkpoints."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

from gpucloud.agent.attempt.files import LEFT_EXIT_CODE
from gpucloud.agent.scripts import script
from gpucloud.agent.scripts.counters import counters_of
from gpucloud.agent.scripts.putting import Directory, Start, Stopped, directory_of
from gpucloud.agent.scripts.script import Reporting, Rewritten, look, why_none
from gpucloud.agent.scripts.taking import Content, Taking, Took
from gpucloud.domain.checkpoint.directory import AfterScript, FileSet, Listing, Settling, Unsaved, after_script
from gpucloud.domain.checkpoint.layouts import (
    Counters,
    Found,
    KeepOrder,
    anew_warning,
    counter_drop,
    step_drop,
)
from gpucloud.domain.checkpoint.manifest import Commit, Counts, Why
from gpucloud.domain.errors import CredentialsError, GpucloudError, StoreError, UsageError
from gpucloud.domain.job.quantities import format_span
from gpucloud.domain.job.spec import OnNotice
from gpucloud.store import lasts
from gpucloud.store.checkpoints import Fenced
from gpucloud.system.retries import Retry, Tries


def keep(order: KeepOrder, words: tuple[str, ...]) -> int:
    """Return the exit code of the attempt on this node."""
    # Ranks are made to tell where they are by SIGABRT; with `launcher: plain` this process bears a rank's variables.
    signal.signal(signal.SIGABRT, lambda *_: None)
    reporting = Reporting(Path(order.folder), rank=order.first_rank)
    start = Start(order, reporting)
    try:
        taking = start.taking()
    except Stopped:
        return LEFT_EXIT_CODE
    except (GpucloudError, OSError) as error:
        hint = f" ({error.hint})" if isinstance(error, GpucloudError) else ""
        reporting.say(f"the directory {order.directory} could not be put back: {error}{hint}")
        if not isinstance(error, UsageError):  # what cannot be read now may be later, or elsewhere
            reporting.barred(str(error))
        return 1
    env = {**os.environ, **dict(start.added.variables)}
    return CheckpointWatcher(order, directory_of(order), reporting, taking, base=start.base).run(
        (*words, *start.added.words), env
    )


# Runs a script beside its directory: whole checkpoints are committed, and the last one before the node goes.
#
# What a newer one overtakes before it was seen to rest, or while another is under way, is passed over.


FENCED = 1
UNSAVED = 1
_TICK_S = 0.05
_LOOK_SHARE = 20  # of the time between two looks, at most this part is spent looking
_ASIDE = timedelta(seconds=10)  # for node 0 to end what it is writing
_TORN = Retry(first_s=0.5, tries=4)
_LAST = Retry(first_s=0.5, longest_s=5.0, within_s=4.0)
_WHOLE_NS = 5 * 10**9  # longer than a file that is being written stays as it is
_RESTS_NS = 60 * 10**9  # longer than between two files of one checkpoint
_OTHERS_S = 60.0  # for other nodes to hand in their parts of the last checkpoint, beside what the longest one took


class CheckpointWatcher:
    """An attempt's script on one node. `taking` is None where node 0's directory alone is kept, and this is another."""

    def __init__(
        self,
        order: KeepOrder,
        directory: Directory,
        reporting: Reporting,
        taking: Taking | None,
        *,
        base: Commit | None = None,
    ) -> None:
        self._base = base
        self._counts = taking.counts if taking else Counts.STEPS
        self._order = order
        self._reporting = reporting
        self._taking = taking
        self._directory = directory
        self._folder = Path(order.folder)
        self._settling = Settling(order.settle.total_seconds())
        self._pool = ThreadPoolExecutor(1)
        self._under_way: tuple[Future[Took], FileSet, Content] | None = None
        self._look_at_s = 0.0
        self._taken_before = 0
        self._leave_by: datetime | None = None
        self._upload_by: datetime | None = None
        self._tries_by: datetime | None = None
        self._told = 0
        self._fenced = False
        self._pending = False
        self._told_none, self._rewritten = False, Rewritten()
        self._began_ns = time.time_ns()
        self._put_back: dict[str, Counters] = {}
        self._unsaved: Unsaved | None = None
        """Why what was there was not saved when it was tried last; None where nothing was wrong with it."""

    def run(self, words: tuple[str, ...], env: Mapping[str, str]) -> int:
        """Start the script and return the exit code of its attempt on this node: 75 for saved and left."""
        if self._taking is not None:
            listing = look(self._directory.path)
            sets = self._taking.there(self._directory.path, listing).sets
            self._settling.take_all(sets, listing)
            if self._base is not None:
                unnamed = (path for one in sets if one.step is None for path in one.paths)
                self._put_back = counters_of(self._directory.path, unnamed)
        child = subprocess.Popen(words, env=env)
        code = None
        while code is None and not self._over():
            self._tick()
            try:
                code = child.wait(_TICK_S)
            except subprocess.TimeoutExpired:
                code = None
        if code is None:
            script.end(self._folder)
            child.wait()
        return self._closed(code)

    def _tick(self) -> None:
        if self._leave_by is None and (at := self._reporting.stop()) is not None:
            self._ask_to_leave(at)
        if self._taking is None or time.monotonic() < self._look_at_s:
            return
        began = time.monotonic()
        self._keep(self._taking, began)
        spent = time.monotonic() - began
        self._look_at_s = began + max(self._order.settle.total_seconds() / 4, _LOOK_SHARE * spent)

    def _ask_to_leave(self, at: datetime) -> None:
        now, taking = datetime.now(timezone.utc), self._taking
        longest = timedelta(seconds=taking.longest_s if taking else 0.0)
        leaving = self._order.leaving(now, at, longest, alone=taking is None)
        self._leave_by, self._upload_by = leaving.script, leaving.upload
        if taking is None and self._order.on_notice is OnNotice.NONE:
            self._leave_by = min(self._leave_by, now + _ASIDE)
        self._taken_before = taking.count if taking else 0
        if taking is not None:
            taking.close_by(time.monotonic() + (self._upload_by - now).total_seconds())
        if self._order.on_notice is not OnNotice.NONE:
            name, script_has = self._order.on_notice.value, format_span(self._leave_by - now)
            self._told, heed = script.tell(self._folder, name, Path(self._order.code))
            to = f"{name} sent to {self._told} ranks"
            if self._told and heed is False:
                to = f"{name} sent, for which no script was found to have a handler: it ends what does not ignore it"
            self._reporting.say(f"asked to stop: {to}; {script_has} to save")
        if leaving.is_short:
            self._reporting.say(
                f"what is saved now may not reach the store: {format_span(at - now)} are left for saving and uploading,"
                f" and the longest upload so far took {format_span(longest)}"
            )

    def _keep(self, taking: Taking, now_s: float) -> None:
        self._finish(taking)
        listing = look(self._directory.path)
        found = self._sets(taking, listing)
        self._tell_unclear(taking, found, listing)
        self._tell_none(taking, found, listing)
        ready = self._settling.look(found.sets, listing, now_s)
        self._pending = self._settling.unsettled(found.sets, listing)
        if self._under_way is not None or not ready or self._is_written_to(ready[0], listing):
            return
        one, content = ready[0], ready[0].content(listing)
        future = self._pool.submit(taking.take, self._directory.path, one, content, proven=False, why=self._why())
        self._under_way = (future, one, content)

    def _is_written_to(self, one: FileSet, listing: Listing) -> bool:
        open_ones = script.written_to(self._folder)
        return any(signature.inode in open_ones for _, signature in one.content(listing))

    def _finish(self, taking: Taking, *, wait: bool = False) -> None:
        """Hear how the commit that is under way went, if it is over."""
        if self._under_way is None or not (wait or self._under_way[0].done()):
            return
        future, one, content = self._under_way
        self._under_way = None
        try:
            took = future.result()
            if took is not Took.CHANGED:
                self._settling.take(one, content)
                self._unsaved = taking.not_taken if took is Took.VOID else None
            if took is Took.SAVED:
                self._directory.forget_aside()
                self._warn(taking)
                self._reporting.progress(taking.committed, taking.counts)
                if self._order.on_notice is OnNotice.NONE:  # how long the script itself takes to save, nobody knows
                    self._reporting.saving(taking.longest_s + self._order.settle.total_seconds())
        except Fenced as error:
            self._reporting.say(str(error))
            self._fenced = True
        except (StoreError, CredentialsError, OSError) as error:
            hint = f" ({error.hint})" if isinstance(error, GpucloudError) else ""
            unsaved = Unsaved(why=f"{error}{hint}", lasts=lasts(error), paths=one.paths)
            self._tell_unsaved("a checkpoint could not be saved", unsaved)

    def _tell_unclear(self, taking: Taking, found: Found, listing: Listing) -> None:
        """Say what is not understood: the last checkpoint where there is one after what was saved, or nothing was."""
        if found.unclear is None:
            return
        if taking.committed and self._settling.has_newest(listing):
            self._reporting.say_once(f"nothing more is saved: {found.unclear}")
        elif self._unsaved is None or not self._unsaved.paths:  # what the store refused may be saved another time
            self._tell_unsaved("nothing is saved", Unsaved(why=found.unclear))

    def _tell_none(self, taking: Taking, found: Found, listing: Listing) -> None:
        """Say once what is missing of the first that looks like a checkpoint, if it stays so."""
        if self._told_none or self._order.rank != 0 or taking.count:
            return
        now_ns, since_ns = time.time_ns(), self._began_ns
        again = self._rewritten.look(listing, since_ns, now_ns - _WHOLE_NS)
        why = why_none(self._order.rule, found, listing, since_ns, now_ns - _RESTS_NS, again)
        if why is not None:
            self._told_none = True
            self._reporting.say(f"nothing is saved yet: {why}")

    def _tell_unsaved(self, what: str, unsaved: Unsaved) -> None:
        self._unsaved = unsaved
        self._reporting.say_once(f"{what}: {unsaved.why}")

    def _warn(self, taking: Taking) -> None:
        """Say that the script did not take what was put back, as its first save shows where both tell their step."""
        if self._base is None or self._order.rank != 0 or taking.count != 1:
            return
        tell_steps = self._counts is taking.counts is Counts.STEPS
        found = (
            step_drop(taking.committed, self._base.step) if tell_steps else counter_drop(taking.first, self._put_back)
        )
        if found is None:
            return
        self._reporting.counter_drop = found
        if tell_steps:  # saves are numbered on
            self._reporting.first_step = 1
        self._reporting.say(anew_warning(found, self._order.additions))

    def _over(self) -> bool:
        """Whether the script is to be ended: nothing more of it can be saved in time."""
        if self._fenced:
            return True
        if self._leave_by is None:
            return False
        if datetime.now(timezone.utc) >= self._leave_by:
            return True
        if self._taking is None or self._under_way is not None:
            return False
        if self._taking.over is not None:
            return self._taking.over
        since = self._taking.count - self._taken_before
        if self._told:
            return since > 0 and not self._pending
        # What was being written when the end was asked for is in the second commit since at the latest: a script that
        # saves again and again must not keep its node until the last moment.
        return since > 1 or not self._pending

    def _closed(self, code: int | None) -> int:
        """Commit what the script left, tell how it stands, and return the exit code."""
        if self._taking is not None:
            self._end_well(self._taking, code)
        self._pool.shutdown()
        if (
            self._order.rank == 0
            and self._taking is not None
            and not self._taking.count
            and (there := look(self._directory.path))
        ):
            layout = self._order.rule.done_file or self._order.rule.layout.value
            why = why_none(self._order.rule, self._sets(self._taking, there), there, self._began_ns)
            nothing = Unsaved(why=why or f"no new checkpoint ({layout}) among the {len(there)} files there")
            self._reporting.say(f"nothing was saved: {(self._unsaved or nothing).why}")
            self._unsaved = self._unsaved or (None if self._taking.committed else nothing)
        if self._fenced:
            return FENCED
        if code == 0 and not self._told:
            return self._over_with(self._unsaved)
        if self._leave_by is None:
            if self._unsaved is not None and self._unsaved.paths:
                self._reporting.say(f"the last checkpoint could not be saved: {self._unsaved.why}")
            return code if code is not None and code >= 0 else 128 - (code or 0)
        if self._order.rank == 0 and self._taking is not None:
            committed = self._taking.committed
            saved = self._taking.counts.named(committed) if committed else "nothing"
            self._reporting.say(f"left: {saved} is saved")
        return LEFT_EXIT_CODE

    def _over_with(self, unsaved: Unsaved | None) -> int:
        """Return the exit code of a script that ended well, and say what is wrong with its last checkpoint."""
        if unsaved is None or self._taking is None or self._order.rank != 0:
            return 0
        unsaved = unsaved.as_left(look(self._directory.path))
        after = after_script(unsaved, os.path.relpath(self._directory.path, self._order.code), self._order.outputs)
        self._reporting.unsaved = unsaved.told(after)
        self._reporting.progress(self._taking.committed, self._taking.counts)
        self._reporting.say(f"its last checkpoint is not saved: {self._reporting.unsaved}")
        if after is AfterScript.AGAIN:
            self._reporting.barred(unsaved.why)
        return 0 if after is AfterScript.OVER else UNSAVED

    def _end_well(self, taking: Taking, code: int | None) -> None:
        """Commit the last set here; on a node that is told by another, go on until that one wants nothing more."""
        if taking.over is None:
            patience = replace(_LAST, within_s=max(_LAST.within_s, self._patience_s(failed=code != 0))).begin()
            if not self._fenced:
                self._keep_the_last(taking, patience, proven=code != 0)
            self._close(taking, patience, ended_well=code == 0)
            return
        # One that failed is heard of at once.
        while code in (0, None) or self._leave_by is not None:
            if taking.over or self._is_late():
                break
            self._tick()
            time.sleep(_TICK_S)
        self._finish(taking, wait=True)

    def _close(self, taking: Taking, tries: Tries, *, ended_well: bool) -> None:
        while True:
            try:
                taking.close()
            except (StoreError, CredentialsError) as error:
                if not self._gives_up() and tries.again():
                    continue
                why = f"the other nodes could not be told of the end: {error} ({error.hint})"
                self._reporting.say(why)
                if ended_well:  # they would wait for it for ever
                    self._reporting.barred(why)
            return

    def _sets(self, taking: Taking, listing: Listing) -> Found:
        try:
            return taking.sets(self._directory.path, listing)
        except (StoreError, CredentialsError) as error:
            self._tell_unsaved("what is to be saved could not be asked", Unsaved(why=f"{error} ({error.hint})"))
            return Found()

    def _keep_the_last(self, taking: Taking, patience: Tries, *, proven: bool) -> None:
        if self._leave_by is None:
            others_s = max(_OTHERS_S + 5 * taking.longest_s, self._patience_s(failed=proven))
            taking.close_by(time.monotonic() + others_s)
        self._finish(taking, wait=True)
        torn = _TORN.begin()
        while True:
            listing = look(self._directory.path)
            found = self._sets(taking, listing)
            self._tell_unclear(taking, found, listing)
            newest = [one for one in found.sets if one.complete and self._settling.unsettled((one,), listing)]
            newest.sort(key=lambda one: one.written_ns(listing), reverse=True)
            troubles = list[Unsaved]()
            for one in newest:
                if not self._settling.unsettled((one,), listing):
                    continue  # of before one that was saved meanwhile
                content, self._unsaved = one.content(listing), None
                future = self._pool.submit(
                    taking.take, self._directory.path, one, content, proven=proven, why=self._why(Why.LAST)
                )
                self._under_way = (future, one, content)
                self._finish(taking, wait=True)
                if self._fenced or not self._settling.unsettled((newest[0],), listing):
                    return
                troubles.append(self._unsaved or Unsaved(why=f"{one.name} is not whole"))
            whole = [trouble for trouble in troubles if trouble.paths]
            self._unsaved = next(iter([*whole, *troubles]), self._unsaved)
            if proven and self._leave_by is None and self._unsaved is not None and self._unsaved.lasts:
                return  # a script that failed unasked is heard of
            tries = patience if whole else torn
            if not newest or self._gives_up() or not tries.again():
                return

    def _why(self, unasked: Why = Why.DUE) -> Why:
        return unasked if self._leave_by is None else self._reporting.why_stop()

    def _patience_s(self, *, failed: bool) -> float:
        """Return how long the last one may take to reach the store: its machine is paid for.

        A script that failed unasked is heard of soon where peers on other machines may wait for it in vain.
        """
        if failed and self._leave_by is None and self._order.rule.nodes > 1:
            return 0.0
        return self._order.upload.total_seconds()

    def _gives_up(self) -> bool:
        """Whether nothing is tried again: outputs come home in half of what a notice has left after the first try."""
        if self._is_late():
            return True
        if self._upload_by is None or not self._order.brings:
            return False
        now = datetime.now(timezone.utc)
        self._tries_by = self._tries_by or now + (self._upload_by - now) / 2
        return now > self._tries_by

    def _is_late(self) -> bool:
        now = datetime.now(timezone.utc)
        if self._upload_by is None and (at := self._reporting.stop()) is not None:
            self._upload_by = self._order.leaving(now, at, timedelta(0), alone=False).upload
        return self._upload_by is not None and now > self._upload_by
