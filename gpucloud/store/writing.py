"""The process that moves a rank's checkpoints into the store beside the training; it has no torch and needs none.

`main` is given URL, PREFIX, KEEP and DESCRIPTOR. It reads one command a line from standard input, and answers
in lines on standard output. The bytes to write lie in the memory behind the descriptor, which it shares with the rank.

    {"save": {"commit": [7, 1200], "name": "rank-…", "size": 4096, "summed": 12}}
    {"commit": {"manifest": "…", "base": [6, 900]}}
    {"best": {"commit": [7, 1200], "metric": 0.93, "generation": 7, "base": [6, 900]}}

    {"saved": [key, size, [crc32, …]], "seconds": 0.2}
    {"committed": true, "seconds": 0.01}
    {"torn": "…"}           what lies in memory is not what the GPU had that it was copied from
    {"failed": "…", "lasts": false}  the store refuses either; `lasts`: it will, until somebody mends it
    {"fenced": "…"}         another attempt has taken over

Before it writes an object it puts the fingerprints of its tensors into the object's header
(`gpucloud.domain.checkpoint.objects`).

A save that carries `"alone": {"level": …, "reason": …, "why": …, "base": …, "epoch": …, "values": …}` is that of the
only rank: it is committed at once, and both answers follow. After a commit it deletes what is no longer needed, and
goes on with that after the next one when a save waits; what goes wrong with that is `{"note": "…"}`.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from gpucloud.domain.checkpoint.manifest import (
    Commit,
    Level,
    Manifest,
    Piece,
    Promise,
    Why,
    manifest_bytes,
    read_manifest,
    read_notes,
)
from gpucloud.domain.checkpoint.objects import SUM_BYTES, place, read_header, sums_at, written
from gpucloud.domain.errors import CredentialsError, StoreError
from gpucloud.store import lasts, open_store, parts
from gpucloud.store.checkpoints import Checkpoints, Fenced

_NICENESS = 5
"""The training comes first, but a save must come to its end beside training that uses every core."""

Command = dict[str, Any]


def main(arguments: list[str]) -> int:
    """Carry out commands until there are no more; the rank's end ends this process wherever it is."""
    answers = _settle()
    url, prefix, keep, descriptor = arguments
    commands = _Commands()
    checkpoints = Checkpoints(open_store(url), prefix, keep=int(keep))
    writer = _Writer(checkpoints, int(descriptor), hurried=commands.have_a_save)
    for command in commands:
        for answer in writer.answers(command):
            answers.write(json.dumps(answer).encode() + b"\n")
            answers.flush()
    return 0


class Torn(Exception):
    """A tensor's copy is not what the GPU had."""


class _Writer:
    def __init__(self, checkpoints: Checkpoints, descriptor: int, hurried: Callable[[], bool]) -> None:
        self._checkpoints = checkpoints
        self._descriptor = descriptor
        self._hurried = hurried
        self._memory: mmap.mmap | None = None

    def answers(self, command: Command) -> Iterator[Command]:
        """Do what the command says, and yield what the rank must hear."""
        began = time.monotonic()
        try:
            if "save" in command:
                saving = command["save"]
                piece = self._save(saving)
                yield {"saved": [piece.key, piece.size, piece.crc32], "seconds": time.monotonic() - began}
                if "alone" in saving:
                    yield from self._commit(_manifest(saving, piece), saving["alone"]["base"], time.monotonic())
            elif "best" in command:
                self._call_best(command["best"])
            else:
                manifest = read_manifest(command["commit"]["manifest"].encode())
                yield from self._commit(manifest, command["commit"]["base"], began)
        except Fenced as error:
            yield {"fenced": str(error)}
        except Torn as error:
            yield {"torn": str(error)}
        except (StoreError, CredentialsError) as error:
            what = f"{error} ({error.hint})"
            if "best" in command:
                yield {"note": f"the best checkpoint could not be marked: {what}"}
            else:
                yield {"failed": what, "lasts": lasts(error)}

    def _save(self, saving: Command) -> Piece:
        size, summed = saving["size"], saving["summed"]
        end = sums_at(size) + SUM_BYTES * summed
        if self._memory is None or len(self._memory) < end:
            self._memory = mmap.mmap(self._descriptor, 0)
        with memoryview(self._memory) as whole, whole[:size] as data, whole[sums_at(size) : end] as sums:
            put_fingerprints(data, sums.cast("q"))
            return self._checkpoints.upload(Commit(*saving["commit"]), saving["name"], data)

    def _call_best(self, best: Command) -> None:
        self._checkpoints.go_on(best["generation"], base=Commit(*best["base"]) if best["base"] else None)
        with contextlib.suppress(Fenced):  # the next save says so
            self._checkpoints.call_best(Commit(*best["commit"]), best["metric"])

    def _commit(self, manifest: Manifest, base: list[int] | None, began: float) -> Iterator[Command]:
        self._checkpoints.go_on(manifest.commit.generation, base=Commit(*base) if base else None)
        self._checkpoints.commit(manifest)
        yield {"committed": True, "seconds": time.monotonic() - began}
        try:
            self._checkpoints.collect(self._hurried)
        except (StoreError, CredentialsError) as error:
            yield {"note": f"older checkpoints could not be deleted, the next save tries again: {error}"}


def put_fingerprints(data: memoryview, stretches: memoryview) -> None:
    """Put the fingerprints of an object's tensors into its header. Raises Torn where a GPU has summed otherwise.

    Without NumPy there are none, nothing is compared, and whoever restores from it says so.
    """
    header = read_header(data)
    room = place(data, len(header.tensors))
    try:
        name = parts.torn(data, header, stretches)
        if name is not None:
            raise Torn(f"{name} was changed while it was copied: from now on saves wait")
        if room is not None:
            data[room] = written(parts.of_object(data, header))
    except ImportError:
        return


def _manifest(saving: Command, piece: Piece) -> Manifest:
    alone = saving["alone"]
    commit = Commit(*saving["commit"])
    promise = Promise(Level(alone["level"]), alone["reason"])
    return Manifest(
        commit=commit,
        world=1,
        promise=promise,
        pieces=(piece,),
        why=Why(alone["why"]),
        notes=read_notes(alone),
    )


def _settle() -> Any:
    """Leave signals to the rank, step back behind it, and return where answers go; prints go to standard error."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


class _Commands:
    """The commands up to `{"end": true}`. Without it, the end of the input means that the rank is dead."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._heard = self._begun = 0  # saves; each is counted by one thread alone
        threading.Thread(target=self._read, daemon=True).start()

    def __iter__(self) -> Iterator[Command]:
        while "end" not in (command := json.loads(self._lines.get())):
            self._begun += "save" in command
            yield command

    def have_a_save(self) -> bool:
        """Whether a save waits to be begun."""
        return self._heard > self._begun

    def _read(self) -> None:
        heard = b""
        while data := os.read(0, 65536):
            *whole, heard = (heard + data).split(b"\n")
            for line in whole:
                self._heard += line.startswith(b'{"save"')
                self._lines.put(line)
        os._exit(0)


def described(manifest: Manifest) -> str:
    """Return the manifest as a command carries it."""
    return manifest_bytes(manifest).decode()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
