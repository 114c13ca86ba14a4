"""Whatever befalls a checkpoint's objects is found before they are loaded; the one before is used, and that is said."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from gpucloud.store import ObjectStore, open_store
from tests.prove.goal import Figure, Form, Goal
from tests.standins import bucket
from tests.standins.saved_runs import PREFIX, SavedRun, forking, restored

Objects = dict[str, bytes]
Damage = Callable[[Objects, random.Random, str, list[str]], None]
"""Changes the object of that key, one of those of the newest checkpoint."""

_HOLE = 4096


def flipped(objects: Objects, chance: random.Random, key: str, newest: list[str]) -> None:
    data = bytearray(objects[key])
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    objects[key] = bytes(data)


def holed(objects: Objects, chance: random.Random, key: str, newest: list[str]) -> None:
    """A block of 4 KiB reads as zeros, as after a lost write."""
    data = bytearray(objects[key])
    at = chance.randrange(0, len(data), _HOLE)
    data[at : at + _HOLE] = bytes(len(data[at : at + _HOLE]))
    objects[key] = bytes(data)


def truncated(objects: Objects, chance: random.Random, key: str, newest: list[str]) -> None:
    objects[key] = objects[key][: chance.randrange(len(objects[key]))]


def grown(objects: Objects, chance: random.Random, key: str, newest: list[str]) -> None:
    objects[key] += chance.choice([b"\0", b" ", b"\n", objects[key]])


def parts_swapped(objects: Objects, chance: random.Random, key: str, newest: list[str]) -> None:
    """Two stretches of one object have changed places."""
    data, size = objects[key], chance.choice([64, 512, 2048])
    size = min(size, len(data) // 2)
    one = chance.randrange(0, len(data) - 2 * size + 1)
    other = chance.randrange(one + size, len(data) - size + 1)
    first, second = data[one : one + size], data[other : other + size]
    objects[key] = data[:one] + second + data[one + size : other] + first + data[other + size :]


def objects_swapped(objects: Objects, chance: random.Random, key: str, newest: list[str]) -> None:
    """Another object of the store lies in its place, and it lies there."""
    other = chance.choice(sorted(set(newest) - {key}))
    objects[key], objects[other] = objects[other], objects[key]


def replaced_by_older(objects: Objects, chance: random.Random, key: str, newest: list[str]) -> None:
    """The object of the same name of an earlier checkpoint, itself whole, lies in its place."""
    name, step = key.rpartition("/")[2], _step(key)
    others = [other for other in objects if other != key and other.split("/")[3:4] == key.split("/")[3:4]]
    like = [o for o in others if _step(o) < step and ("data/" not in o or o.rpartition("/")[2] == name)]
    objects[key] = objects[chance.choice(sorted(like))]


def removed(objects: Objects, chance: random.Random, key: str, newest: list[str]) -> None:
    del objects[key]


DAMAGES: tuple[Damage, ...] = (
    flipped, holed, truncated, grown, parts_swapped, objects_swapped, replaced_by_older, removed,
)  # fmt: skip


class _Checkpoints:
    """The objects of a real run of two ranks, with what each of its commits restores."""

    def __init__(self, folder: Path) -> None:
        run = SavedRun(folder / "run", ranks=2, keep=3)
        assert run.attempt() == [0, 0], run.said()
        root = Path(run.url)
        keys = [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]
        self.objects = {key: (root / key).read_bytes() for key in sorted(keys) if key.startswith(PREFIX)}
        self.steps = sorted({_step(key) for key in self.objects if "/commit/" in key})
        assert self.steps == [2, 4, 6], self.steps

    def of(self, step: int) -> list[str]:
        """The keys of a commit: its manifest and both ranks' objects."""
        return [key for key in self.objects if f"{step:09d}" in key]

    def files(self, step: int) -> dict[str, bytes]:
        return {key.rpartition("/")[2]: self.objects[key] for key in self.of(step) if "/data/" in key}


def run(form: Form) -> Iterator[Figure]:
    """Yield what was loaded although damaged, what was not said, and in how many cases, for each kind of store."""
    cases = {"directory": 400 if form is Form.SHORT else 1000, "s3": 40 if form is Form.SHORT else 1000}
    with tempfile.TemporaryDirectory() as folder, forking():
        made = _Checkpoints(Path(folder))
        root = Path(folder) / "damaged"
        figures = [_try("directory", made, _Files(root), open_store(str(root)), cases["directory"])]
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        with bucket.serving() as server, _environment(server.environment):
            server.put({}, "damaged")
            figures.append(_try("s3", made, _Bucket(server), open_store("s3://damaged"), cases["s3"]))
    yield Figure(name="ckpt-corrupt", value=sum(figures), limit=0)
    yield Figure(name="ckpt-corrupt.cases", value=sum(cases.values()), limit=sum(cases.values()), least=True)


def _try(kind: str, made: _Checkpoints, place: _Files | _Bucket, store: ObjectStore, cases: int) -> int:
    """Return in how many cases something damaged was loaded, or passed over in silence."""
    wrong = 0
    for seed in range(cases):
        chance = random.Random(f"{kind}{seed}")
        damage = DAMAGES[seed % len(DAMAGES)]
        objects = dict(made.objects)
        bad = [6, 4] if chance.random() < 0.2 else [6]  # now and then the one before is damaged too
        for step in bad:
            damage(objects, chance, chance.choice(made.of(step)), made.of(step))
        place.make(objects)
        found = _found_wrong(made, objects, bad, store)
        if found is not None:
            wrong += 1
            sys.stderr.write(f"ckpt-corrupt: {kind} seed {seed}, {damage.__name__} of steps {bad}: {found}\n")
    return wrong


def _found_wrong(made: _Checkpoints, objects: Objects, bad: list[int], store: ObjectStore) -> str | None:
    damaged = [step for step in bad if any(objects.get(key) != made.objects[key] for key in made.of(step))]
    expected = max(step for step in made.steps if step not in damaged)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        loaded = restored(store)
    if loaded is None or loaded.commit.step != expected:
        return f"step {loaded.commit.step if loaded else None} was loaded instead of {expected}"
    if dict(loaded.files) != made.files(expected):
        return f"other bytes than step {expected} had"
    # A manifest that is gone altogether was never there, as far as anybody can tell.
    told = [step for step in damaged if f"/commit/000001/{step:09d}.json" in "".join(objects)]
    silent = [step for step in told if f"the checkpoint of step {step} is damaged: passed over" not in said.getvalue()]
    return f"steps {silent} were passed over in silence" if silent else None


class _Files:
    """Objects made as files, changed ones only."""

    def __init__(self, root: Path) -> None:
        self._root, self._there = root, Objects()

    def make(self, objects: Objects) -> None:
        for key in set(objects) | set(self._there):
            if objects.get(key) != self._there.get(key):
                path = self._root / key
                path.parent.mkdir(parents=True, exist_ok=True)
                path.unlink(missing_ok=True)
                if key in objects:
                    path.write_bytes(objects[key])
        self._there = objects


class _Bucket:
    """The same in a bucket."""

    def __init__(self, server: bucket.Server) -> None:
        self._client, self._there = server.client(), Objects()

    def make(self, objects: Objects) -> None:
        for key in set(objects) | set(self._there):
            if key not in objects:
                self._client.delete_object(Bucket="damaged", Key=key)
            elif objects[key] != self._there.get(key):
                self._client.put_object(Bucket="damaged", Key=key, Body=objects[key])
        self._there = objects


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _step(key: str) -> int:
    numbers = [part.removesuffix(".json") for part in key.split("/")]
    return next((int(part) for part in numbers if len(part) == 9 and part.isdigit()), -1)


GOAL = Goal(
    promise="a flip, hole, truncation or swap in a checkpoint's objects is found before load; the one before is used",
    real="checkpoints of two ranks by gpucloud.resume, its restore, the directory store, the S3 store over HTTP",
    simulated="S3 is moto's; the damage is done to the objects behind the store's back",
    run=run,
)
