"""What machines send is written below the folder that it arrives in or nowhere; honest trees arrive as they were."""

from __future__ import annotations

import io
import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, cast

from gpucloud.adapters.transfer import node_program
from gpucloud.adapters.transfer.copying import Copier, packed_program
from gpucloud.adapters.transfer.outputs import OutputsFolder, StoredOutputs, bring_stored_home
from gpucloud.cli.commands.reaching import _place
from gpucloud.domain.errors import GpucloudError
from gpucloud.domain.untrusted import STAGING
from gpucloud.ports import Completed
from gpucloud.store import ObjectStore
from tests.fakes.clock import JumpingClock
from tests.fakes.memory_store import MemoryStore
from tests.fakes.nodes import node_at
from tests.prove.goal import Figure, Form, Goal
from tests.standins.lying_node import EVIL, LyingHost, hostile_json, hostile_name, hostile_rows

HOSTILE = {Form.SHORT: 2_400, Form.LONG: 30_000}
HONEST = {Form.SHORT: 510, Form.LONG: 4_000}
_TOGETHER = 30  # copies into one folder, one after the other: what one leaves is there for the next
_LOOKED = 6  # of them between two looks at all that lies around: a divisor
_NAMES = (
    "a", "b", "model.pt", "Model.pt", "x y", "\u00e9t\u00e9", "e\u0301t\u00e9", "\u4e16\u754c", "\U0001f4a5", "..a",
    "a..", "...", "-rf", "new\nline", "\\", "tab\t", ".hidden", ".x.part", "~", "*", "[a]", "raw-\udcff", "n" * 200,
    " ", "'\"",
)  # fmt: skip

Way = Callable[[Random, Path, Path], None]


def run(form: Form) -> Iterator[Figure]:
    """Count what was written elsewhere, and what did not arrive as it was."""
    # In memory, where there is such a place: what is durable is not what is proven here.
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        wrong, landed = _hostile(Path(folder) / "hostile", HOSTILE[form])
        unlike, links = _honest(Path(folder) / "honest", HONEST[form])
    for what in (*wrong, *unlike)[:50]:
        sys.stderr.write(f"landing: {what}\n")
    yield Figure(name="landing", value=len(wrong) + len(unlike), limit=0)
    yield Figure(name="landing.hostile", value=HOSTILE[form], limit=2_000, least=True)
    yield Figure(name="landing.landed", value=landed, limit=HOSTILE[form] // 20, least=True)
    yield Figure(name="landing.refused", value=HOSTILE[form] - landed, limit=HOSTILE[form] // 20, least=True)
    yield Figure(name="landing.honest", value=HONEST[form], limit=500, least=True)
    yield Figure(name="landing.links", value=links, limit=100, least=True)


# Hostile ones


def _hostile(folder: Path, count: int) -> tuple[list[str], int]:
    """Return what was written where it must not be, and how many of the attempts were written at all."""
    wrong: list[str] = []
    landed = 0
    for start in range(0, count, _TOGETHER):
        home = folder / str(start)
        target = _made(home)
        before = _around(home, target)
        for seed in range(start, start + _TOGETHER):
            chance = Random(seed)
            way = (_copied, _brought, _profiled, _stored)[seed % 4]
            try:
                way(chance, home, target)
                landed += 1
            except GpucloudError as error:
                if "\n" in str(error) or "\x1b" in str(error):
                    wrong.append(f"seed {seed}: the error is no line of text: {error!r}")
            except Exception as error:  # noqa: BLE001  whatever comes out is what we look for
                wrong.append(f"seed {seed}: {way.__name__}: {type(error).__name__}: {error}"[:300])
            if seed % _LOOKED == _LOOKED - 1:
                wrong += [f"seeds up to {seed}: {what}" for what in _strayed(before, home, target)]
        shutil.rmtree(home)
    return wrong, landed


def _made(home: Path) -> Path:
    """Make a home with what is worth having, and in it the folder that things arrive in, which has links of its own."""
    target = home / "proj" / "here"
    for name in ("a", "p", "out", ".ssh", "proj/a", "proj/.ssh", "proj/here/in", "proj/here/q"):
        (home / name).mkdir(parents=True)
    for name in (
        ".profile",
        "profile",
        ".ssh/authorized_keys",
        "a/b",
        "proj/.profile",
        "proj/train.py",
        "out/b",
        "p/z",
    ):
        (home / name).write_text("mine\n")
    (target / "mine").symlink_to(home / "out")
    (target / "q" / "out").symlink_to("../../../out")
    (target / "notes").symlink_to("../train.py")
    return target


def _copied(chance: Random, home: Path, target: Path) -> None:
    asked = chance.choice(("results", "results/", "a/top", ".", "*", "**/z", "~/out", "results/model.pt"))
    copier = Copier(_liar(chance, home, asked.rstrip("/")), ".")
    found = copier.listing([asked])
    copier.fetch(found, *_place(found, asked, target if chance.random() < 0.8 else target / "new"))


def _brought(chance: Random, home: Path, target: Path) -> None:
    asked = chance.choice((("results/",), ("a", "b"), ("*",), ("p/q", "p/*")))
    OutputsFolder(asked, target).bring_home(_liar(chance, home, asked[0].rstrip("/")), "code", 1)


def _profiled(chance: Random, home: Path, target: Path) -> None:
    name = chance.choice(("rank-0", "rank-1.json", "rank-0/../..", "rank-0.summary.json"))
    OutputsFolder((), target).bring_profile(_liar(chance, home, name), 1)


def _liar(chance: Random, home: Path, asked: str) -> LyingHost:
    rows = hostile_rows(chance, home, asked)
    answer = hostile_json(chance, rows) if chance.random() < 0.1 else rows
    return LyingHost(answer, tells_more=chance.random() < 0.05)


def _stored(chance: Random, home: Path, target: Path) -> None:
    """The prefix of the job's outputs in a store that lets any key in, with notes of any kind."""
    bucket, place = _Bucket(), chance.choice(("", "attempt-1", "attempt-20"))
    paths: list[list[Any]] = []
    for _ in range(chance.randrange(1, 6)):
        rows = hostile_rows(chance, home, "x")
        names = [str(row[1]) for row in _listed(rows["files"])]
        for name in names[:2]:
            bucket.objects[f"jobs/j/outputs/files/{place and f'{place}/'}{name}"] = EVIL
            paths.append([name, {"size": len(EVIL), "mode": 0o6777, "mtime_ns": chance.choice((0, -1, 10**15))}])
        if chance.random() < 0.5:
            paths += [[row[1], {"link": row[2]}] for row in _listed(rows["links"])]
        if chance.random() < 0.3:
            paths.append([hostile_name(chance, home), {}])
    notes: Any = {"paths": paths}
    bucket.objects[f"jobs/j/outputs/notes{place and f'/{place}'}.json"] = (
        hostile_json(chance, notes) if chance.random() < 0.1 else json.dumps(notes).encode()
    )
    bring_stored_home(cast(ObjectStore, bucket), "j", target)


def _listed(rows: Any) -> list[Any]:
    return [row for row in rows if isinstance(row, list)] if isinstance(rows, list) else []


class _Bucket:
    """A store that refuses no key."""

    def __init__(self) -> None:
        self.url = "s3://bucket"
        self.objects: dict[str, bytes] = {}

    def list(self, prefix: str) -> tuple[str, ...]:
        return tuple(sorted(key for key in self.objects if key.startswith(prefix)))

    def get(self, key: str) -> Any:
        store = MemoryStore(JumpingClock())
        if key in self.objects:
            store.put("x", self.objects[key])
        return store.get("x")

    def read_into(self, key: str, at: int, into: memoryview) -> bool:
        data = self.objects.get(key, b"")[at : at + len(into)]
        into[: len(data)] = data
        return len(data) == len(into)

    def delete(self, key: str) -> None:
        self.objects.pop(key, None)


def _around(home: Path, target: Path) -> dict[str, tuple[object, ...]]:
    """Return all that is not in the target: what it is, how many names it has, when it was changed, what is in it."""
    found: dict[str, tuple[object, ...]] = {}
    for above, folders, files in os.walk(home.parent):
        here = Path(above)
        if here == target:
            folders.clear()
            continue
        for name in (*folders, *files):
            status = (here / name).lstat()
            content = (here / name).read_bytes() if stat.S_ISREG(status.st_mode) else b""
            changed = status.st_mtime_ns if (here / name) != target else 0
            found[f"{here}/{name}"] = (status.st_mode, status.st_nlink * (here / name != target), changed, content)
    return found


def _strayed(before: dict[str, tuple[object, ...]], home: Path, target: Path) -> Iterator[str]:
    """Yield what is not as it was around the target, and what in it leads out or is not whole."""
    now = _around(home, target)
    yield from (f"{path} was written" for path in now.keys() | before.keys() if now.get(path) != before.get(path))
    own = {target / "mine", target / "q" / "out", target / "notes"}
    for above, folders, files in os.walk(target):
        for name in (*folders, *files):
            path = Path(above) / name
            status = path.lstat()
            if stat.S_ISLNK(status.st_mode):
                real = os.path.realpath(path)
                if path not in own and real != str(target) and not real.startswith(f"{target}/"):
                    yield f"{path} leads to {real}"
            elif name.startswith(STAGING) or status.st_mode & 0o7022 or (name in files and path.read_bytes() != EVIL):
                yield f"{path} was left, is open to others, or is not whole"


# Honest ones


def _honest(folder: Path, count: int) -> tuple[list[str], int]:
    """Return the trees that did not arrive as they were, and how many links did."""
    wrong, links = [], 0
    for seed in range(count):
        chance = Random(seed)
        there, home = folder / "there", folder / "home"
        (there / "top").mkdir(parents=True)
        links += _grown(chance, there / "top")
        way = (_copy_back, _bring_back, _store_back)[seed % 3]
        try:
            arrived = way(there, home)
            wrong += [f"tree {seed}: {way.__name__}: {what}" for what in _unlike(there / "top", arrived)]
        except Exception as error:  # noqa: BLE001  whatever comes out is what we look for
            wrong.append(f"tree {seed}: {way.__name__}: {type(error).__name__}: {error}")
        shutil.rmtree(folder)
    return wrong, links


def _grown(chance: Random, top: Path) -> int:
    """Make a tree; return how many links it has."""
    folders, files, links = [top], [], 0
    for _ in range(chance.choice((1, 4, 9, 25))):
        path = chance.choice(folders) / chance.choice(_NAMES)
        kind = chance.random()
        if os.path.lexists(path):
            continue
        if kind < 0.3:
            path.mkdir()
            folders.append(path)
        elif kind < 0.75 or not files:
            path.write_bytes(chance.randbytes(chance.choice((0, 1, 100, 5000))))
            path.chmod(chance.choice((0o644, 0o600, 0o755, 0o640, 0o700)))
            os.utime(path, ns=(0, chance.randrange(10**18)))
            files.append(path)
        else:
            to = chance.choice((*files, *folders, path.with_name("nothing")))
            path.symlink_to(os.path.relpath(to, path.parent))
            links += 1
    for path in folders[1:]:
        path.chmod(chance.choice((0o755, 0o700, 0o750)))
    return links


class _Here:
    """A node that is this process: the real program for copies answers."""

    node = node_at(22, None)

    def run(self, argv: tuple[str, ...], *, stdin: bytes = b"", timeout_s: float = 30.0) -> Completed:
        del argv, timeout_s
        if not stdin:  # what was being written is asked for first: nothing was
            return Completed(exit_code=1, stdout=b"", stderr=b"")
        out = io.BytesIO()
        node_program.main(io.BytesIO(stdin.removeprefix(packed_program())), out)
        return Completed(exit_code=0, stdout=out.getvalue(), stderr=b"")


def _copy_back(there: Path, home: Path) -> Path:
    copier = Copier(cast(Any, _Here()), str(there))
    found = copier.listing(["top"])
    copier.fetch(found, *_place(found, "top", home))
    return home


def _bring_back(there: Path, home: Path) -> Path:
    OutputsFolder(("top/",), home).bring_home(cast(Any, _Here()), str(there), 1)
    return home / "top"


def _store_back(there: Path, home: Path) -> Path:
    store = MemoryStore(JumpingClock())
    outputs = StoredOutputs(store, "j", home.with_name("drive"), lambda target: OutputsFolder(("top/",), target))
    outputs.bring_home(cast(Any, _Here()), str(there), 1)
    bring_stored_home(store, "j", home)
    return home / "top"


def _unlike(one: Path, other: Path) -> Iterator[str]:
    wanted, found = _content(one), _content(other)
    for name in wanted.keys() | found.keys():
        if wanted.get(name) != found.get(name):
            yield f"{name!r} is {found.get(name)!r}, and was {wanted.get(name)!r}"[:300]


def _content(top: Path) -> dict[str, tuple[object, ...]]:
    found: dict[str, tuple[object, ...]] = {}
    for path in top.rglob("*"):
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            about: tuple[object, ...] = (os.readlink(path),)  # noqa: PTH115  a Path would tidy it
        elif stat.S_ISDIR(status.st_mode):
            about = (status.st_mode,)
        else:
            about = (status.st_mode, status.st_mtime_ns, path.read_bytes())
        found[str(path.relative_to(top))] = about
    return found


GOAL = Goal(
    promise="nothing that a machine or its part of the store names is written outside of the folder that it arrives in",
    real="copies, outputs and profiles by SSH's programs and by the store, the landing, the disk",
    simulated="the machine: its answers are made by seed; honest ones are the real program's, run in this process",
    run=run,
)
