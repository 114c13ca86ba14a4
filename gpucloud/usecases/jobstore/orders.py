"""Orders for jobs and the runs that they are of: read by whoever supervises, given by the user's side."""

from __future__ import annotations

import getpass
import hashlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Protocol

from gpucloud.domain.codec import Malformed, OtherVersion
from gpucloud.domain.errors import (
    CredentialsError,
    OrderChanged,
    OrderUnreadable,
    StoreError,
    UsageError,
)
from gpucloud.domain.job.spec import Job
from gpucloud.domain.state.order import (
    OWN,
    Envelope,
    Order,
    OrderMark,
    Refusal,
    end_alone,
    followed,
    is_ahead,
    is_same_request,
    mark_of,
    opened,
    refuse_order,
    run_of,
    sealed,
)
from gpucloud.domain.state.state import ExitReason
from gpucloud.ports import Clock, Signer, Trust
from gpucloud.store import Conflict
from gpucloud.usecases.jobstore.jobstore import UPGRADE, JobStore

_TRIES = 50  # of a compare-and-swap that others come before


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """An order as it is stored: with its envelope, and the version to write the next one over."""

    order: Order
    envelope: Envelope
    version: str


class Marks(Protocol):
    """The newest orders that were seen on the user's side, which nobody who writes to the store can set back."""

    def seen(self, store: str, job: str) -> OrderMark | None:
        """Return the newest of a run; None for one that is new here. Raises StoreError."""
        ...

    def raise_to(self, store: str, job: str, mark: OrderMark) -> None:
        """Keep it in place of an older one; a newer one stays, whoever saw it when. Raises StoreError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Who reads orders on the user's side: whose word counts, and what was read before."""

    trust: Trust
    marks: Marks


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """One run's orders.

    `signer` is None where nobody signs: on a machine, which gives no orders; `reader` is None where nobody verifies:
    there too, for a machine's role may not write orders, and it has nothing to verify with.
    """

    jobs: JobStore
    clock: Clock
    signer: Signer | None = None
    reader: Reader | None = None

    def given(self) -> Given | None:
        """Return the newest order; None where there is no such run.

        Raises OrderUnreadable for one that is damaged, or gone from beside the run's state; StoreError.
        """
        found = self.jobs.order()
        if found is None and self.jobs.exists():
            hint = f"gpucloud down {self.jobs.job}"
            raise OrderUnreadable(f"{self.jobs.order_url} is not there, and the job is", hint=hint)
        if found is None:
            return None
        envelope, version = found
        try:
            order = opened(envelope)
        except OtherVersion as error:
            raise StoreError(f"{self.jobs.order_url} is of {error} of it: nothing is done", hint=UPGRADE) from error
        except Malformed as error:
            hint = f"gpucloud down {self.jobs.job}"
            raise OrderUnreadable(f"{self.jobs.order_url} cannot be read: {error}", hint=hint) from error
        if (order.job, order.store) != (self.jobs.job, self.jobs.store.url):
            raise StoreError(
                f"{self.jobs.order_url} is an order for {order.job} in {order.store}",
                hint="a store that was moved is put back where it was, or a link to it is",
            )
        return Given(order=order, envelope=envelope, version=version)

    def newest(self) -> Given:
        """Return the newest order. UsageError where there is none, raises StoreError."""
        given = self.given()
        if given is None:
            raise UsageError(f"there is no job {self.jobs.job!r} in {self.jobs.store.url}", hint="gpucloud status")
        return given

    def acted_on(self) -> Given:
        """Return the newest order, which may be acted on here: of one that is unsigned or was put back, its end alone.

        Raises CredentialsError for one that may not be, StoreError.
        """
        seen = self._seen()  # before the order is read: one that is given meanwhile is newer than both
        given = self.newest()
        if (refusal := self._refusal(given, seen)) is not None:
            raise CredentialsError(refusal.why, hint=refusal.hint)
        if not self.is_trusted(given) or self._is_ahead(given) or (seen is not None and mark_of(given.order) < seen):
            return replace(given, order=end_alone(given.order))
        self._keep(given.order, over=seen)
        return given

    def is_trusted(self, given: Given) -> bool:
        """Whether somebody whose word counts here signed the order."""
        return self.reader is None or self.signed_by(given) is not None

    def put_back_before(self, given: Given) -> OrderMark | None:
        """Return the mark of the newest order that was seen here where this one is older: somebody put it back."""
        seen = self._seen()
        return seen if seen is not None and mark_of(given.order) < seen else None

    def is_own(self, given: Given) -> bool:
        """Whether the user's own key signed the order; true too where nobody verifies."""
        return self.reader is None or self.signed_by(given) == OWN

    def signed_by(self, given: Given) -> str | None:
        """Return whose key signed the order, of those that are trusted here; None for nobody's."""
        return signer_of(given, self.reader) if self.reader is not None else None

    def first(self, order: Order) -> Given:
        """Give a new run its first order; over what a start left that made no state. Raises OrderChanged."""
        left = self.jobs.order()
        if left is not None and self.jobs.load() is not None:
            raise _changed(opened(left[0]))
        return self._write(order, left[1] if left is not None else None)

    def keep_first(self, given: Given) -> Given:
        """Return the first order of a run whose state its giver has made, put back where another start wrote over it.

        The state refuses that one, which so has ordered nothing. Raises OrderChanged.
        """
        newest = self.newest()
        if newest.version == given.version or newest.order.number > given.order.number:
            return given
        return self._write(given.order, newest.version)

    def give(self, order: Order, over: Given) -> Given:
        """Give the next order, unless it wants what `over` did. OrderChanged where another one came in between."""
        newest = self.newest()
        if newest.version != over.version:
            raise _changed(newest.order)
        if is_same_request(order, newest.order) and self.is_trusted(newest):
            return newest
        return self._write(followed(self._after(order, newest.order), caller(), self.clock.now()), over.version)

    def _after(self, order: Order, newest: Order) -> Order:
        """Return the order as one that comes after the newest in the store, and after the newest that was here."""
        seen = self._seen()
        if seen is None or seen < mark_of(replace(order, number=newest.number)):
            return replace(order, number=newest.number)
        return replace(order, first_at=seen.first_at, number=seen.number)

    def change(self, change: Callable[[Order], Order]) -> Given:
        """Change the newest order, whichever that is; it stays where nothing is changed. Raises StoreError.

        One that nobody signed whose word counts here may be ended, and stays unsigned; else CredentialsError.
        """
        for _ in range(_TRIES):
            seen = self._seen()
            newest = self.newest()
            changed = change(followed(newest.order, caller(), self.clock.now()))
            if is_same_request(changed, newest.order):
                return newest
            refusal = self._refusal(replace(newest, order=replace(newest.order, end=None)), seen)
            only_ends = changed.end is not None and is_same_request(
                replace(changed, end=newest.order.end), newest.order
            )
            if refusal is not None and not only_ends:
                raise CredentialsError(refusal.why, hint=refusal.hint)
            try:
                return self._write(changed, newest.version, giver=newest.envelope.key if refusal is not None else None)
            except OrderChanged:
                continue
        raise StoreError(f"{self.jobs.order_url} is being changed all the time", hint="the same again", may_pass=True)

    def end(self, why: ExitReason = ExitReason.STOPPED) -> Given:
        """Order the job's end."""
        return self.change(lambda order: order if order.end is not None else replace(order, end=why))

    def end_in_place(self, job: Job, host: str) -> Given:
        """Order the job's end by an order of one's own, in place of one that nobody can read. Raises OrderChanged."""
        now, seen = self.clock.now(), self._seen()
        run = run_of(job.name, self.jobs.job)
        order = Order(
            number=seen.number + 1 if seen is not None else 1,
            store=self.jobs.store.url,
            job=self.jobs.job,
            base=job.name if run is not None else self.jobs.job,
            run=run or 1,
            by=caller(),
            at=now,
            first_at=seen.first_at if seen is not None else now,
            host=host,
            resolved=job,
            spec_sha256="",
            file_budget_usd=Decimal(0),
            budget_usd=Decimal(0),
            end=ExitReason.STOPPED,
        )
        return self._write(order, self.jobs.order_version())

    def _refusal(self, given: Given, seen: OrderMark | None) -> Refusal | None:
        if self.reader is None:
            return None
        key, ahead = given.envelope.key if given.envelope.signature else "", self._is_ahead(given)
        return refuse_order(given.order, signed_by=self.signed_by(given), seen=seen, key=key, ahead=ahead)

    def _is_ahead(self, given: Given) -> bool:
        return not self.is_own(given) and is_ahead(given.order, self.clock.now())

    def _seen(self) -> OrderMark | None:
        return self.reader.marks.seen(self.jobs.store.url, self.jobs.job) if self.reader is not None else None

    def _keep(self, order: Order, *, over: OrderMark | None) -> None:
        if self.reader is not None and (over is None or over < mark_of(order)):
            try:
                self.reader.marks.raise_to(self.jobs.store.url, self.jobs.job, mark_of(order))
            except StoreError:
                if order.end is None:  # an end may be given by anybody, and a full disk here keeps none from it
                    raise

    def _write(self, order: Order, over: str | None, *, giver: str | None = None) -> Given:
        """Write the order over that version, signed; with the key of its `giver`, unsigned."""
        envelope = sealed(order, giver or "")
        if self.signer is not None and giver is None:
            envelope = sealed(order, self.signer.key_id, self.signer.sign(envelope.signed))
        try:
            version = self.jobs.put_order(envelope, over)
        except Conflict:
            newest = self.given()
            if newest is None or newest.envelope != envelope:  # else it was ours, and its reply was lost
                raise _changed(newest.order if newest is not None else None) from None
            version = newest.version
        if giver is None:
            self._keep(order, over=None)
        return Given(order=order, envelope=envelope, version=version)


def signer_of(given: Given, reader: Reader) -> str | None:
    """Return whose key signed the order, of those that the reader trusts; None for nobody's."""
    sealed_in = given.envelope
    return reader.trust.verify(sealed_in.signed, sealed_in.key, sealed_in.signature_bytes)


def is_strangers(given: Given, host: str, reader: Reader | None) -> bool:
    """Whether another gpucloud home than `host` gave the order, and nobody whom the reader trusts signed it.

    An end by somebody without a say is unsigned, and names the key of who gave the run. What names none tells nothing,
    nor does an order in place of one that nobody could read.
    """
    if reader is None or given.order.host == host or given.order.is_stand_in or signer_of(given, reader) is not None:
        return False
    key, signature = given.envelope.key, given.envelope.signature
    return bool(key) and (bool(signature) or reader.trust.name_of(key) is None)


def caller() -> str:
    """Return who asks, for the record: user and host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # no such user in the password file, as in a container
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def sha256_of(spec: bytes) -> str:
    """Return the hash by which an order knows the job file it was made of."""
    return hashlib.sha256(spec).hexdigest()


def _changed(newest: Order | None) -> OrderChanged:
    if newest is None:
        return OrderChanged("the job's order was removed just now", hint="the same command again")
    said = "has it end" if newest.end is not None else "goes before this one"
    return OrderChanged(
        f"order {newest.number} for {newest.job}, by {newest.by} at {newest.at:%H:%M:%S} UTC, {said}",
        hint="the same command again comes after it",
    )
