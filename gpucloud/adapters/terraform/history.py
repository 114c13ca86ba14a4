"""What was done to a stack before: whether its state can be believed, and how it is mended when it cannot.

Three objects lie in the store: Terraform's state, the intent of the last run (`run.json`, written before it) and the
proof of the last apply that ended well (`applied.json`, written after it). They agree, or something is in doubt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpucloud.adapters.terraform.record import Applied, Run, read, read_state, write
from gpucloud.adapters.terraform.statehome import StateHome
from gpucloud.adapters.terraform.workfolder import write as write_file
from gpucloud.domain.errors import ProvisionError
from gpucloud.store.contract import Stored


class History:
    """The past of one stack, as its home in the store and the working folder tell it. Reads each object when asked."""

    def __init__(self, home: StateHome, folder: Path) -> None:
        self._home = home
        self._copy = folder / "applied.json"
        self._stored: Stored | None = None
        self._stored_is_read = False

    def last(self) -> tuple[Applied | None, bool]:
        """Return the last apply that ended well, and whether the state is still the one it left.

        On the machine that applied last this costs one read: of the state.
        """
        copy = read(Applied, self._copy.read_bytes()) if self._copy.exists() else None
        if copy is not None and self._is_left_by(copy):
            return copy, True
        stored = self._record(Applied, self._home.applied)
        return stored, stored is not None and self._is_left_by(stored)

    def variables(self) -> Mapping[str, Any] | None:
        """Return the variables of the run that was begun last, else of the last good apply; None: no record is left."""
        run: Run | None = self._record(Run, self._home.run)
        if run is not None and run.variables:
            return run.variables
        applied: Applied | None = self._record(Applied, self._home.applied)
        return applied.variables if applied else None

    def is_settled(self) -> bool:
        """Whether the run that was begun last ended well and its state is there: then the state knows everything."""
        applied: Applied | None = self._record(Applied, self._home.applied)
        run: Run | None = self._record(Run, self._home.run)
        return applied is not None and run is not None and applied.run == run.id and self._is_left_by(applied)

    def known(self) -> frozenset[str]:
        """Return every address in the state; none when there is no state."""
        stored = self._state()
        state = read_state(stored.data) if stored else None
        return state.addresses() if state else frozenset()

    def mend(self, story: Callable[[str], None]) -> None:
        """Put the last whole version in the place of a state that is lost or damaged, where the store keeps versions.

        A damaged one is kept aside. Where no version is kept the state begins anew, and what stands must be imported.
        """
        stored = self._state()
        applied: Applied | None = self._record(Applied, self._home.applied)
        if stored is None and applied is None:
            return
        if stored is not None:
            if not _is_damaged(stored, applied):
                return
            aside = f"{self._home.state}.damaged-{stored.modified:%Y%m%dT%H%M%SZ}"
            story(f"Terraform's state of {self._home.name} is damaged: it is kept as {aside}")
            self._home.store.put(aside, stored.data)
        else:
            story(f"Terraform's state of {self._home.name} is gone")
        self._restore(applied, story)
        self._stored_is_read = False

    def _restore(self, applied: Applied | None, story: Callable[[str], None]) -> None:
        wanted = applied.sha256 if applied else None
        whole = next((data for data in self._home.earlier() if _sha256(data) == wanted), None)
        if whole is not None:
            self._home.store.put(self._home.state, whole)
            story("its last whole version is back in place")
            return
        # The new state will have a lineage of its own: the proof of the old one says nothing about it.
        self._home.store.delete(self._home.applied)
        self._home.store.delete(self._home.state)

    def begin(self, run: Run) -> None:
        """Put the intent on record."""
        self._home.store.put(self._home.run, write(run))

    def keep(self, run: Run, *, digest: str, outputs: Mapping[str, Any]) -> None:
        """Put on record that the run ended well."""
        self._stored_is_read = False
        stored = self._state()
        state = read_state(stored.data) if stored else None
        if stored is None or state is None:
            raise ProvisionError(
                f"Terraform's state of {self._home.name} is not in {self._home.store.url} after an apply that ended "
                "well",
                hint="the same command again takes everything that was made into a new state",
            )
        applied = Applied(
            run=run.id,
            digest=digest,
            sha256=_sha256(stored.data),
            lineage=state.lineage,
            serial=state.serial,
            variables=run.variables,
            outputs=outputs,
        )
        self._home.store.put(self._home.applied, write(applied))
        write_file(self._copy, write(applied))

    def forget(self) -> None:
        """Remove the records and the empty state; what was kept aside too."""
        for key in (self._home.applied, self._home.state, self._home.run):
            self._home.store.delete(key)
        for key in self._home.store.list(f"{self._home.state}."):
            self._home.store.delete(key)
        self._copy.unlink(missing_ok=True)

    def _state(self) -> Stored | None:
        if not self._stored_is_read:
            self._stored = self._home.store.get(self._home.state)
            self._stored_is_read = True
        return self._stored

    def _is_left_by(self, applied: Applied) -> bool:
        state = self._state()
        return state is not None and _sha256(state.data) == applied.sha256

    def _record(self, kind: type[Any], key: str) -> Any:
        stored = self._home.store.get(key)
        return read(kind, stored.data) if stored else None


def _is_damaged(stored: Stored, applied: Applied | None) -> bool:
    """Whether Terraform cannot have written this: it is torn, or other bytes under the number of a former state."""
    state = read_state(stored.data)
    if state is None:
        return True
    if applied is None or _sha256(stored.data) == applied.sha256:
        return False
    return state.lineage != applied.lineage or state.serial <= applied.serial


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
