"""A checkpoint made to attack whoever loads it: nothing of it is ever run, and the one before is used."""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import pickle
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gpucloud.domain.checkpoint.manifest import Commit, Manifest, Piece, commit_key, manifest_bytes
from gpucloud.domain.checkpoint.objects import sums_of
from gpucloud.domain.errors import GpucloudError
from gpucloud.store import open_store
from gpucloud.store.checkpoints import Checkpoints
from gpucloud.usecases.checkpoint.checkpoints import StoredCheckpoints
from gpucloud.usecases.checkpoint.pulling import planned, write
from tests.prove.goal import Figure, Form, Goal
from tests.standins.saved_runs import PREFIX, SavedRun, forking, restored

ROOT = Path(__file__).resolve().parents[2]
_UNPICKLING = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
_UNPICKLING_CALLS = {
    "torch.load", "np.load", "numpy.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "dcp.load", "eval",
    "exec", "dist.all_gather_object", "dist.gather_object", "dist.broadcast_object_list", "dist.scatter_object_list",
    "dist.recv_object_list", "dist.send_object_list",
}  # fmt: skip


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self._marker),)


def run(form: Form) -> Iterator[Figure]:
    """Yield how often something was run, or the attack was not passed over, and in how many cases."""
    with tempfile.TemporaryDirectory() as folder, forking():
        cases = tuple(_cases(Path(folder)))
        with _told_of_pickles() as opened:
            wrong = [found for found in (case() for case in cases) if found]
    wrong += opened + _calls_that_unpickle()
    for found in wrong:
        sys.stderr.write(f"ckpt-hostile: {found}\n")
    yield Figure(name="ckpt-hostile", value=len(wrong), limit=0)
    yield Figure(name="ckpt-hostile.cases", value=len(cases), limit=len(cases), least=True)


def _cases(folder: Path) -> Iterator[Callable[[], str | None]]:
    whole = SavedRun(folder / "run", keep=3)
    assert whole.attempt() == [0], whole.said()
    objects = _attacks(folder / "marker", whole)
    for name, data in objects.items():
        yield lambda name=name, data=data: _planted(folder, whole, f"{name} as an object", data, sealed=False)
        yield lambda name=name, data=data: _planted(folder, whole, f"{name}, with a manifest", data, sealed=True)
    for name, manifest in _bad_manifests(whole).items():
        yield lambda name=name, manifest=manifest: _replaced(folder, whole, name, manifest)


def _attacks(marker: Path, whole: SavedRun) -> dict[str, bytes]:
    torch_file = io.BytesIO()
    torch.save({"weights": Payload(marker)}, torch_file)
    own = (Path(whole.url) / PREFIX / _newest(whole).pieces[0].key).read_bytes()
    return {
        "a pickle": pickle.dumps(Payload(marker)),
        "a torch file": torch_file.getvalue(),
        "a pickle behind a header": _safetensors({"__metadata__": {"shared": "{}"}}) + pickle.dumps(Payload(marker)),
        "numpy objects": _with_own(own, _numpy("O", pickle.dumps(Payload(marker)))),
        "numpy fields": _with_own(own, _numpy("V3", b"abcd")),
        "JSON without end": struct.pack("<Q", 200_000) + b"[" * 200_000,
        "own part without end": _with_own(own, json.loads("[" * 500 + "]" * 500)),
        "a header beyond the file": struct.pack("<Q", 2**63) + b"{}",
        "negative sizes": _safetensors({"x": {"dtype": "F32", "shape": [-1, -4], "data_offsets": [0, 16]}}) + bytes(16),
        "a tensor of the header": _safetensors({"x": {"dtype": "U8", "shape": [9], "data_offsets": [-9, 0]}}),
        "words for numbers": _safetensors({"x": {"dtype": "F32", "shape": ["a"], "data_offsets": ["b", "c"]}}),
        "a list for a header": struct.pack("<Q", 2) + b"[]",
        "unknown kinds": _with_own(own, {"$": "reduce", "items": [["os.system", "id"]]}),
    }


def _bad_manifests(whole: SavedRun) -> dict[str, bytes]:
    newest = _newest(whole)
    elsewhere = ("../../../etc/passwd", "/etc/passwd", "data/000001/000000006/../x", "gen/000001.json", "")
    made = {f"object at {key!r}": _manifest(newest, key) for key in elsewhere}
    nested = {"nested": b"[" * 100_000, "a pickle": pickle.dumps([1]), "empty": b"", "not UTF-8": b"\xff\xfe{}"}
    return made | nested


def _planted(folder: Path, whole: SavedRun, name: str, data: bytes, *, sealed: bool) -> str | None:
    newest = _newest(whole)
    path = Path(whole.url) / PREFIX / newest.pieces[0].key
    manifest = manifest_bytes(replace(newest, pieces=(_piece(newest.pieces[0].key, data),))) if sealed else None
    with _changed(path, data), _changed(_manifest_path(whole, newest.commit), manifest):
        return _loaded_wrongly(folder, name) or _exported_wrongly(folder, whole, name)


def _replaced(folder: Path, whole: SavedRun, name: str, manifest: bytes) -> str | None:
    with _changed(_manifest_path(whole, _newest(whole).commit), manifest):
        return _loaded_wrongly(folder, f"manifest: {name}")


def _loaded_wrongly(folder: Path, name: str) -> str | None:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            found = restored(open_store(str(folder / "run" / "store")))
    except Exception as error:  # noqa: BLE001  whatever comes out is what we look for
        return f"{name}: {type(error).__name__}: {error}"
    if (folder / "marker").exists():
        (folder / "marker").rmdir()
        return f"{name}: it was run"
    if found is None or found.commit.step != 4:
        return f"{name}: step {found.commit.step if found else None} was loaded instead of 4"
    return None if "step 6 is damaged: passed over" in said.getvalue() else f"{name}: passed over in silence"


def _exported_wrongly(folder: Path, whole: SavedRun, name: str) -> str | None:
    """Who exports it gets a file of tensors, or is told that it is none to export."""
    stored_checkpoints = StoredCheckpoints(store=open_store(whole.url), prefix=PREFIX, keep=3)
    try:
        exported = planned(stored_checkpoints, _newest(whole), everything=True, about={})
        write(stored_checkpoints, _newest(whole), exported, folder / "exported.safetensors")
    except GpucloudError:
        pass
    except Exception as error:  # noqa: BLE001  whatever comes out is what we look for
        return f"{name}: exported: {type(error).__name__}: {error}"
    return f"{name}: exporting ran it" if (folder / "marker").exists() else None


@contextlib.contextmanager
def _told_of_pickles() -> Iterator[list[str]]:
    """Give a list to which each pickle that is opened in this process is added, whatever is in it."""
    opened: list[str] = []
    here = True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if here and event == "pickle.find_class":
            opened.append(f"a pickle was opened that asks for {arguments}")

    def told(name: str) -> Callable[..., Any]:
        return lambda *_, **__: opened.append(f"pickle.{name} was called")

    sys.addaudithook(hook)  # it cannot be taken out again
    names = ("load", "loads", "Unpickler")
    kept = {name: getattr(pickle, name) for name in names}
    for name in names:
        setattr(pickle, name, told(name))
    try:
        yield opened
    finally:
        here = False
        for name in names:
            setattr(pickle, name, kept[name])


@contextlib.contextmanager
def _changed(path: Path, data: bytes | None) -> Iterator[None]:
    before = path.read_bytes()
    path.write_bytes(before if data is None else data)
    try:
        yield
    finally:
        path.write_bytes(before)


def _newest(whole: SavedRun) -> Manifest:
    return next(Checkpoints(open_store(whole.url), PREFIX, keep=3).candidates())


def _manifest_path(whole: SavedRun, commit: Commit) -> Path:
    return Path(whole.url) / PREFIX / commit_key(commit)


def _piece(key: str, data: bytes) -> Piece:
    return Piece(key=key, size=len(data), crc32=sums_of((memoryview(data),)).crc32)


def _manifest(like: Manifest, key: str) -> bytes:
    return manifest_bytes(replace(like, pieces=(replace(like.pieces[0], key=key),)))


def _safetensors(header: dict[str, object]) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


def _with_own(data: bytes, own: object) -> bytes:
    """Return a rank's object with another part of its own."""
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"]["own"] = json.dumps(own)
    return _safetensors(header) + data[8 + length :]


def _numpy(dtype: str, data: bytes) -> dict[str, object]:
    text = base64.b64encode(data).decode()
    return {"loader": {"$": "numpy", "dtype": dtype, "shape": [1], "data": text, "scalar": False}}


def _calls_that_unpickle() -> list[str]:
    """Return the places in the product that could run what they read."""
    found = []
    for path in sorted((ROOT / "gpucloud").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names = [name for name in names if name.split(".")[0] in _UNPICKLING]
            if isinstance(node, ast.Call) and ast.unparse(node.func) in _UNPICKLING_CALLS:
                names.append(ast.unparse(node.func))
            found += [f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}: {name}" for name in names]
    return found


GOAL = Goal(
    promise="a pickle or anything else planted as a checkpoint is never run, and the whole one before it is used",
    real="a real run's checkpoint with its object replaced, its restore and its export; every module of the product",
    simulated="nothing",
    run=run,
)
