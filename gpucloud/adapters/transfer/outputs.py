"""Brings a job's outputs home, from its machines or by way of the store."""

from __future__ import annotations

import mmap
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from functools import reduce
from pathlib import Path
from typing import TypeVar

from gpucloud.adapters.transfer.copying import Copier, Listing
from gpucloud.adapters.transfer.localfiles import CameNotes, mark_results
from gpucloud.domain import codec
from gpucloud.domain.errors import LandingRefused, StoreError
from gpucloud.domain.node.member import attempt_folder
from gpucloud.domain.node.status import WRITING, written_in
from gpucloud.domain.state.state import NOT_THERE, Attempt, MissingOutput
from gpucloud.domain.untrusted import Arriving, Tree, parent_of, shown
from gpucloud.ports import Brought, Host, Outputs
from gpucloud.store import PART_BYTES, ObjectStore
from gpucloud.store.contract import Heard, unheard
from gpucloud.store.landing import Landing
from gpucloud.system.wholefile import content_of

_NAME_CHARS = 200  # a node chooses its names: a longer one is nothing to tell
_MOST_READ = 1 << 18
_TORN = "was being written when the script was ended: it may be incomplete"
_UNKNOWN = ""  # no name of a content: an earlier version noted none
_ELSEWHERE = ", which leads elsewhere or is no file"


class OutputsFolder:
    """Implements `Outputs`: `paths` (patterns too), relative to the code folder, arrive under `target` as they were.

    `python` is the interpreter on nodes. What was cut off goes on with the next call; what is here already stays, under
    another name where a file that differs takes its place. With
    `marks` the folder is marked as results, which are no code of a later start. `earlier` brings what earlier attempts
    have left elsewhere: it comes first, or would take the place of what is newer. `require_home` raises StoreError
    where the folder that `target` belongs to is not here: it is not made, for nobody would find what comes into it.
    """

    def __init__(
        self,
        paths: tuple[str, ...],
        target: Path,
        *,
        python: str = "python3",
        marks: bool = False,
        earlier: Callable[[], Brought] = Brought,
        require_home: Callable[[], None] = lambda: None,
    ) -> None:
        self._earlier, self._require_home = earlier, require_home
        self._paths, self._target, self._python, self._marks = paths, target, python, marks
        self._came, self._brought = CameNotes(target), frozenset[str]()

    def bring_home(
        self, host: Host, code: str, attempt: int, moves: Heard | None = None, paths: tuple[str, ...] = ()
    ) -> Brought:
        """Return what arrived, as local paths, and what the script did not make.

        A link that stays inside the code folder arrives as a link; one that leads out to a file, as that file.
        """
        paths = tuple(dict.fromkeys((*paths, *self._paths)))
        if not paths:
            return Brought()
        self._require_home()
        # Asked first: once the files are here, a machine that goes takes none of them.
        written = _written(host, attempt)
        try:
            earlier = self._earlier()
        except LandingRefused as error:  # these are not to blame, and find a place elsewhere
            raise StoreError(str(error), hint=error.hint) from error
        brought, found = self._bring(host, code, paths, "", attempt, moves)
        self._brought = frozenset(os.path.normpath(f"{file.top}/{file.inner}") for file in found.files)
        both = _together(earlier, brought)
        return replace(both, missing=(*both.missing, *_not_there(found), *_left_out(found), *_torn(found, written)))

    def note(self, attempt: Attempt, missing: tuple[MissingOutput, ...], began: datetime) -> None:
        """Note that they came, in what the folder is marked with."""
        if self._marks:
            self._came.note(attempt, missing, began, self._brought)

    def came(self, attempt: Attempt) -> tuple[MissingOutput, ...] | None:
        """Return what was missing of outputs that came, by what the folder is marked with."""
        return self._came.came(attempt)

    def bring_profile(self, host: Host, attempt: int) -> tuple[str, ...]:
        """Return what of the attempt's profiles arrived from the host, below `profile/attempt-<n>`."""
        self._require_home()
        folder = f"{attempt_folder(host.node.root, attempt)}/profile"
        return self._bring(host, folder, ("rank-*",), f"profile/attempt-{attempt}", attempt)[0].paths

    def _bring(
        self,
        host: Host,
        base: str,
        paths: tuple[str, ...],
        below: str,
        attempt: int,
        moves: Heard | None = None,
    ) -> tuple[Brought, Listing]:
        new = [0]

        def progress(_: int, lacking: int) -> None:
            new.append(lacking)
            heard()

        heard = moves or (lambda: None)
        copier = Copier(host, base, python=self._python, progress=progress, heard=heard)
        found = copier.listing(paths)

        def place_of(top: str) -> str:
            return "/".join((*below.split("/"), *(part for part in top.split("/") if part != "."))).strip("/")

        adapted: list[Landing] = []
        _, set_aside, gone = copier.fetch(found, self._target, place_of, _before(attempt), adapted.append)
        deleted = frozenset(gone)  # a script chooses how many files there are
        came = tuple(file for file in found.files if file.path not in deleted)
        away = [file for file in found.files if file.path in deleted]
        tops_lost = {file.top for file in away if not file.inner}
        lost = tuple((path, None) for path in dict.fromkeys(paths) if path in tops_lost)
        found = replace(found, files=came, missing=(*found.missing, *lost))
        if self._marks:
            mark_results(self._target)
        tops = dict.fromkeys(place_of(top) for top in found.asked_folders)
        files = dict.fromkeys(place_of(file.top) for file in found.files if not file.inner)
        others = [name for name in files if not _is_below_any(name, tops)]
        size = max(new) - sum(file.size for file in away)
        brought = Brought(paths=(*tops, *others), size=size, set_aside=tuple(map(str, set_aside)))
        return _as_it_lies(brought, self._target, adapted[0] if adapted else None), found


def _before(attempt: int) -> str:
    """Return how the name ends of what an attempt's outputs would have written over."""
    return f"before-attempt-{attempt}" if attempt else "before"


def _not_there(found: Listing) -> Iterator[MissingOutput]:
    for path, near in found.missing:
        tellable = near is not None and near.isprintable() and len(near) <= _NAME_CHARS
        yield MissingOutput(path=path, why=NOT_THERE, nearest=near if tellable else None)


def _left_out(found: Listing) -> Iterator[MissingOutput]:
    """Yield one for each output of which something was left out, however much."""
    left_out: dict[str, list[str]] = {}
    for asked, path in found.outside:
        left_out.setdefault(asked, []).append(path)
    for asked, (first, *more) in left_out.items():
        name = _told(first)
        many = f" and {len(more)} more, which lead elsewhere or are no files"
        yield MissingOutput(path=asked, why=f"came without {name}{many if more else _ELSEWHERE}")


def _written(host: Host, attempt: int) -> tuple[str, ...]:
    """Return what, by its node's word, was being written when the attempt's script was killed."""
    path = f"{attempt_folder(host.node.root, attempt)}/{WRITING}"
    return written_in(host.run(("head", "-c", str(_MOST_READ), path)).stdout[:_MOST_READ])


def _torn(found: Listing, written: tuple[str, ...]) -> Iterator[MissingOutput]:
    """Yield one for each output that is among what was being written."""
    code = f"/{found.base.rstrip('/').rpartition('/')[2]}/"  # how it is reached may differ: a home may be a link
    ends = {path.partition(code)[2] for path in written}
    for file in found.files:
        if file.path in ends:
            yield MissingOutput(path=_told(f"{file.top}/{file.inner}".rstrip("/")), why=_TORN)


def _told(name: str) -> str:
    return name if name.isprintable() and len(name) <= _NAME_CHARS else shown(name)


def _is_below_any(path: str, tops: Container[str]) -> bool:
    """Whether the path is one of the tops, or lies in one; the empty top is that of everything."""
    while path and path not in tops:
        path = parent_of(path)
    return path in tops


# Outputs by way of the store: a machine that drives its job puts them there, a command outside brings them home.


T = TypeVar("T")
_Missing = tuple[MissingOutput, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Note:
    """What a path is beside its bytes: a file of `size` and `content`, a link, or else a folder. A machine wrote it."""

    mode: int = 0o644
    mtime_ns: int | None = None
    size: int | None = None
    link: str | None = None
    content: str = _UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class _Notes:
    paths: tuple[tuple[str, _Note], ...]


class StoredOutputs:
    """Implements `Outputs`: what arrives below `folder` by `fetching(folder)` goes on into the store.

    Without a folder it is one for temporary files: the disk of the user's own may be what is full.
    """

    def __init__(self, store: ObjectStore, job: str, folder: Path | None, fetching: Callable[[Path], Outputs]) -> None:
        self._store, self._job, self._folder = store, job, folder
        self._fetching = fetching

    def bring_home(
        self, host: Host, code: str, attempt: int, moves: Heard | None = None, paths: tuple[str, ...] = ()
    ) -> Brought:
        """Return the keys of what was put into the store, and what the script did not make."""
        brought, keys = self._through(
            lambda outputs: outputs.bring_home(host, code, attempt, moves, paths), attempt, moves
        )
        return replace(brought, paths=keys, size=0, set_aside=())

    def note(self, attempt: Attempt, missing: tuple[MissingOutput, ...], began: datetime) -> None:
        """Note nothing: what is in the store is told by the store."""

    def came(self, attempt: Attempt) -> None:
        """Return None, too."""

    def bring_profile(self, host: Host, attempt: int) -> tuple[str, ...]:
        """Return the keys of what was put into the store."""
        return self._through(lambda outputs: outputs.bring_profile(host, attempt), attempt)[1]

    def _through(
        self, bring: Callable[[Outputs], T], attempt: int, moves: Heard | None = None
    ) -> tuple[T, tuple[str, ...]]:
        own = self._folder  # one for each attempt: what comes of one that is over is brought beside the next
        folder = own.with_name(f"{own.name}-{attempt}") if own is not None else self._temporary()
        shutil.rmtree(folder, ignore_errors=True)
        try:
            brought = bring(self._fetching(folder))
            return brought, tuple(self._keep(folder, _Stored(store=self._store, job=self._job, attempt=attempt), moves))
        finally:
            shutil.rmtree(folder if self._folder is not None else folder.parent, ignore_errors=True)

    def _temporary(self) -> Path:
        try:
            return Path(tempfile.mkdtemp(prefix="gpucloud-")) / "outputs"
        except OSError as error:
            raise StoreError(f"no folder for temporary files: {error}", hint="free some space") from error

    def _keep(self, folder: Path, place: _Stored, moves: Callable[[], None] | None) -> Iterator[str]:
        """A store has objects only: what is no file, and what a file is beside its bytes, is noted in one of its own.

        Notes are kept from call to call, and before the files that they are of: there is a call for each machine. Each
        attempt has its own place, so that none writes over what another has left.
        """
        found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))}
        notes = {**place.read_notes(), **{name: _noted(path, moves or unheard) for name, path in found.items()}}
        if found:
            self._store.put(place.notes, codec.to_json(_Notes(paths=tuple(notes.items()))).encode())
        for name, path in found.items():
            if notes[name].size is not None:
                key = f"{place.files}{name}"
                self._put(key, path, moves or unheard)
                yield key

    def _put(self, key: str, path: Path, heard: Heard) -> None:
        """Write a file as an object without reading it whole: a script chose how large it is."""
        try:
            with path.open("rb") as file:
                is_empty = os.fstat(file.fileno()).st_size == 0  # nothing can be mapped of it
                data = b"" if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}", hint="the same command again") from error
        # Never closed by hand: an error of the store's keeps what it was sending.
        if len(data) <= PART_BYTES or path.name == "state.json":  # of that name a bucket takes no plain write
            self._store.put(key, memoryview(data))
            heard()
        else:
            self._store.write(key, (memoryview(data),), heard)


def stored_attempts(store: ObjectStore, job: str) -> frozenset[int]:
    """Return of which attempts outputs are in the store, by one request: their notes come first and go last."""
    try:
        return _noted_attempts(store, job)
    except StoreError:
        return frozenset()


def bring_stored_home(store: ObjectStore, job: str, target: Path, *, marks: bool = False) -> Brought:
    """Bring what a machine put into the store to `target` and remove it there; return where it is now.

    With `marks` the folder is marked as results, which are no code of a later start.

    May be repeated. Raises StoreError (the store does not answer, or nothing can be written there), LandingRefused for
    what would lie elsewhere than below `target`: then nothing of that attempt is brought, and it stays in the store.
    """
    brought = Brought()
    for place in _stored(store, job):
        tree, unnoted, contents = _tree(place)
        brought = _together(brought, _copy(place, tree, unnoted, contents, target))
        if marks:
            mark_results(target)
        for key in (*(f"{place.files}{file.name}" for file in tree.files), *store.list(place.notes)):
            store.delete(key)
    return brought


def copy_stored(store: ObjectStore, job: str, target: Path) -> Brought:
    """Bring the same to `target`, as it was on that machine, and leave it there. Raises the same."""
    return reduce(_together, (_copy(place, *_tree(place), target) for place in _stored(store, job)), Brought())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """Where the store has what an attempt has left; 0 is where all of it lay before each had a place of its own."""

    store: ObjectStore
    job: str
    attempt: int
    keys: tuple[str, ...] = ()  # of its files

    @property
    def files(self) -> str:
        """What the keys of its files begin with."""
        return f"{_files(self.job)}{f'attempt-{self.attempt}/' if self.attempt else ''}"

    @property
    def notes(self) -> str:
        """The key of its notes."""
        return f"{_notes(self.job)}{f'/attempt-{self.attempt}' if self.attempt else ''}.json"

    def read_notes(self) -> dict[str, _Note]:
        """Return what is noted of each of its paths."""
        stored = self.store.get(self.notes)
        try:
            return dict(codec.from_json(_Notes, stored.data).paths) if stored is not None else {}
        except codec.Malformed as error:
            raise StoreError(f"the notes on the outputs are damaged: {error}", hint=_bare(self.job)) from error


def _stored(store: ObjectStore, job: str) -> tuple[_Stored, ...]:
    """Return where outputs of the job are in the store, that of the first attempt first."""
    attempts = _noted_attempts(store, job)
    keys: dict[int, list[str]] = {attempt: [] for attempt in sorted(attempts)}
    for key in store.list(_files(job)):
        found = re.match(r"attempt-([1-9]\d{0,8})/", key.removeprefix(_files(job)))
        attempt = int(found[1]) if found is not None and int(found[1]) in attempts else 0
        keys.setdefault(attempt, []).append(key)
    return tuple(_Stored(store=store, job=job, attempt=n, keys=tuple(found)) for n, found in sorted(keys.items()))


def _noted_attempts(store: ObjectStore, job: str) -> frozenset[int]:
    keys = (key.removeprefix(_notes(job)) for key in store.list(_notes(job)))
    noted = (re.fullmatch(r"(?:/attempt-([1-9]\d{0,8}))?\.json", key) for key in keys)
    return frozenset(int(found[1] or 0) for found in noted if found is not None)


def _copy(place: _Stored, tree: Tree, unnoted: _Missing, known: dict[str, str], target: Path) -> Brought:
    """Return what is here now, of what that attempt has left; a file that is here already is not read again."""
    size = 0
    with Landing(target, aside=_before(place.attempt), adapts=True) as landing:
        landing.expect(tree)
        for file in tree.files:
            if not landing.has(file, known.get(file.name, _UNKNOWN)):
                _receive(place.store, place.files + file.name, file, landing)
                size += file.size
        landing.settle()
    names, aside = (*(one.name for one in tree.files), *dict(tree.links)), tuple(map(str, landing.set_aside))
    return _as_it_lies(Brought(paths=names, size=size, set_aside=aside, missing=unnoted), target, landing)


def _as_it_lies(brought: Brought, target: Path, landing: Landing | None) -> Brought:
    """Return what came, its names as paths: by those that it has on this disk, and without what that cannot have."""
    renamed, left_out = (landing.renamed, landing.left_out) if landing is not None else ({}, {})
    paths = (str(target / renamed.get(name, name)) for name in brought.paths if name not in left_out)
    missing = (MissingOutput(path=_told(name), why=f"was left out: it is {why}") for name, why in left_out.items())
    others = tuple((_told(name), _told(place)) for name, place in renamed.items())
    return replace(brought, paths=tuple(paths), renamed=others, missing=(*brought.missing, *missing))


def _together(one: Brought, other: Brought) -> Brought:
    paths = tuple(dict.fromkeys((*one.paths, *other.paths)))
    aside, missing = (*one.set_aside, *other.set_aside), (*one.missing, *other.missing)
    renamed = (*one.renamed, *other.renamed)
    return Brought(paths=paths, size=one.size + other.size, set_aside=aside, renamed=renamed, missing=missing)


def _tree(place: _Stored) -> tuple[Tree, _Missing, dict[str, str]]:
    """Return what the store holds, what of it is left there, and the names of its files' contents.

    A file without a note was put there by somebody else, and its size is not known: it keeps nothing else from coming.
    """
    names, notes = [key.removeprefix(place.files) for key in place.keys], place.read_notes()
    sizes = {name: notes[name].size if name in notes else None for name in names}
    why = f"stays in the store: no machine of the job noted it; {_bare(place.job)}"
    unnoted = tuple(MissingOutput(path=_told(name), why=why) for name, size in sizes.items() if size is None)
    rest = {name: note for name, note in notes.items() if note.size is None and name not in sizes}
    tree = Tree(
        files=tuple(
            Arriving(name=name, size=size, mode=notes[name].mode, mtime_ns=notes[name].mtime_ns)
            for name, size in sizes.items()
            if size is not None
        ),
        links=tuple((name, note.link) for name, note in rest.items() if note.link is not None),
        folders=tuple((name, note.mode) for name, note in rest.items() if note.link is None),
    )
    return tree, unnoted, {name: note.content for name, note in notes.items()}


def _receive(store: ObjectStore, key: str, file: Arriving, landing: Landing) -> None:
    """Bring an object as a file, if it has the size that was noted of it."""
    with landing.part(file, key) as part:
        is_whole = part.fill(store, key, file.size) and not store.read_into(key, file.size, memoryview(bytearray(1)))
    if not is_whole:
        why = f"{key} has another size than was noted"
        raise StoreError(why, hint="the same command again, once its machine is done")
    landing.keep(file, key, durable=True)


def _noted(path: Path, heard: Heard) -> _Note:
    if path.is_symlink():
        return _Note(link=str(path.readlink()))
    status = path.stat()
    mode = stat.S_IMODE(status.st_mode) & 0o777
    if path.is_dir():
        return _Note(mode=mode)
    with path.open("rb") as file:
        content = content_of(file.fileno(), heard)
    return _Note(mode=mode, mtime_ns=status.st_mtime_ns, size=status.st_size, content=content)


def _bare(job: str) -> str:
    return f"gpucloud cp -r {job}:@store/outputs/files FOLDER brings them without their modes, times and links"


def _files(job: str) -> str:
    return f"jobs/{job}/outputs/files/"


def _notes(job: str) -> str:
    return f"jobs/{job}/outputs/notes"
