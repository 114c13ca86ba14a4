"""A trainer without torch that keeps real checkpoints: counts steps, commits some, and remembers whose steps it has.

As a script of a job it runs once on each node. Rank 0 commits; the ranks meet at every step over TCP, as those of a
collective do. A rank whose peer falls silent goes on alone: no writer is worse than one that does not know that it
has been replaced.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

from gpucloud.domain.checkpoint.manifest import Commit, Manifest, Promise
from gpucloud.store import ObjectStore, open_store
from gpucloud.store.checkpoints import Checkpoints, Fenced


class Trainer:
    """One attempt at a job. `history` is `[generation, the step it began from]` for everyone whose steps these are."""

    def __init__(self, store: ObjectStore, prefix: str, attempt: int) -> None:
        self.fenced = Fenced
        self._checkpoints = Checkpoints(store, prefix, keep=3)
        self.base: Commit | None = None
        self.step, self.history = 0, []
        self._checkpoints.announce(attempt)
        for manifest in self._checkpoints.candidates():
            found = self._checkpoints.fetch(manifest)
            if found is not None:
                self.base = manifest.commit
                said = json.loads(found[0])
                self.step, self.history = said["step"], said["history"]
                break
        self._checkpoints.begin(base=self.base, attempt=attempt)
        self.generation = self._checkpoints.generation
        self.history = [*self.history, [self.generation, self.step]]

    def save(self) -> None:
        """Commit this step and delete what is no longer needed. Raises Fenced."""
        commit = Commit(self.generation, self.step)
        data = json.dumps({"step": self.step, "history": self.history}).encode()
        piece = self._checkpoints.upload(commit, "state", memoryview(data))
        self._checkpoints.commit(Manifest(commit=commit, world=1, promise=Promise(), pieces=(piece,)))
        self._checkpoints.collect()


class _Peers:
    """The other ranks; silent ones are given up after half a second."""

    def __init__(self) -> None:
        self._ends: list[socket.socket] = []
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        if world > 1 and rank == 0:
            with socket.create_server(("", place[1])) as server:
                server.settimeout(30)
                self._ends = [server.accept()[0] for _ in range(world - 1)]
        elif world > 1:
            self._ends = [_join(place)]
        for end in self._ends:
            end.settimeout(0.5)

    def meet(self) -> None:
        for end in tuple(self._ends):
            try:
                end.sendall(b".")
                alone = not end.recv(1)
            except OSError:
                alone = True
            if alone:
                print("alone", flush=True)
                self._ends.remove(end)


def _join(place: tuple[str, int]) -> socket.socket:
    deadline = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection(place, timeout=5)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def main() -> int:
    """Train as the job's environment says: STEPS steps of STEP_S seconds, a commit every EVERY."""
    folder, rank = Path(os.environ["GPUCLOUD_ATTEMPT_DIR"]), os.environ["RANK"]
    steps, step_s, every = int(os.environ["STEPS"]), float(os.environ["STEP_S"]), int(os.environ["EVERY"])
    peers = _Peers()
    trainer = None
    step = 0
    if rank == "0":
        store = open_store(os.environ["GPUCLOUD_STORE"])
        trainer = Trainer(store, os.environ["GPUCLOUD_CHECKPOINTS"], int(os.environ["GPUCLOUD_ATTEMPT"]))
        step = trainer.step
        print("generation", trainer.generation, "from", step, flush=True)
    while step < steps and not (folder / "stop.json").exists():
        time.sleep(step_s)
        peers.meet()
        step += 1
        if trainer is not None:
            trainer.step = step
            print("step", step, flush=True)
            if step % every == 0 or step == steps:
                try:
                    trainer.save()
                except trainer.fenced as error:
                    print("fenced:", error, flush=True)
                    return 76
    left = step < steps
    if trainer is not None and left:
        trainer.save()
    if trainer is not None and not left:
        print("history", json.dumps(trainer.history), flush=True)
    (folder / f"{'left' if left else 'done'}-{rank}.json").write_text("{}")
    return 75 if left else 0


if __name__ == "__main__":
    sys.exit(main())
