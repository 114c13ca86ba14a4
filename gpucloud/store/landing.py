"""The one place where files from other machines are written: below one folder, through no link, each whole.

Everything goes into a private folder inside the target first, under names of our own. Once all of it is whole and
proven, it is moved to its places by folder descriptors, of which none was opened through a link: what a machine sent
before, or a program here does meanwhile, cannot turn a name elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import posixpath
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from gpucloud.domain.errors import LandingRefused, RemoteCommandFailed, StoreError
from gpucloud.domain.job.quantities import format_size
from gpucloud.domain.untrusted import STAGING, Arriving, Tree, fold, judge, judge_together, landing_of, parent_of, shown
from gpucloud.store.filling import Part
from gpucloud.system.processes import try_lock
from gpucloud.system.wholefile import (
    FOLDER,
    content_of,
    free_name,
    has_equal,
    is_file,
    is_there,
    made_and_opened,
    opened_below,
    same,
)

_STAGINGS = 16  # copies into one folder at once
_MOST_LINKS = 40  # after one another, as Linux counts
_LATEST_NS = 253_402_300_799 * 10**9  # the end of the year 9999
_FORGOTTEN_S = 7 * 24 * 3600  # a part that another landing left, and none has gone on with since
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Landing:
    """A tree that arrives below `root`, which is made if need be and may itself be reached through the user's links.

    Enter it, `expect` the tree, fill a `part` for each file, `keep` it, and `settle`. Left before that, it has changed
    nothing; with `resumes`, what was cut off is there for the next landing of the same files in the same folder, though
    not when what was sent is at fault. With `aside`, what lies in a file's place and differs is kept, by that ending of
    its name. With `adapts`, what this disk alone cannot have keeps nothing else from coming: `renamed` says which names
    of the tree come under which others, and `left_out` which links do not come, and why. `heard` is called while files
    are read here, at least once a GiB: that takes minutes, and nothing moves.
    Errors: LandingRefused for what the sender named, StoreError for what is in the way here.
    """

    def __init__(
        self,
        root: Path,
        *,
        resumes: bool = False,
        aside: str | None = None,
        adapts: bool = False,
        heard: Callable[[], None] = lambda: None,
    ) -> None:
        self.root = root
        self.set_aside, self.renamed, self.left_out = list[Path](), dict[str, str](), dict[str, str]()
        self._resumes = resumes
        self._aside = aside
        self._adapts = adapts
        self._heard = heard
        self._tree = Tree()
        self._own_parts: set[str] = set()
        self._kept: dict[str, str] = {}
        self._made: list[Path] = []
        self._top = self._staging = -1
        self._name = ""
        self._is_settled = False

    def __enter__(self) -> Landing:
        """Nothing is touched before a tree is expected."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Leave what a later landing can go on with, if this one was cut off."""
        if self._staging >= 0:
            at_fault = kind is not None and issubclass(kind, (LandingRefused, RemoteCommandFailed))
            self._clear(whole=self._is_settled or at_fault or not self._resumes)
            with contextlib.suppress(OSError):  # it holds what can be gone on with
                os.rmdir(self._name, dir_fd=self._top)
            os.close(self._staging)
        if self._top >= 0:
            os.close(self._top)
        if not self._is_settled:
            for folder in reversed(self._made):
                with contextlib.suppress(OSError):
                    folder.rmdir()

    def expect(self, tree: Tree) -> None:
        """Say what arrives, before a byte of it does: what may not, or cannot, is refused now."""
        judge(tree)
        self._tree = tree
        self._own_parts = {_digest(file.name) for file in tree.files}
        with self.explained():
            self._open()
            if self._folds():
                if not self._adapts:
                    judge_together(tree, folded=True)
                self.renamed = unfolded(tree)
                self._tree = placed(tree, self.renamed)
            self._require_places()
            self._judge_links()
        self.require_room(tree.files)

    def _judge_links(self) -> None:
        """Leave out, or refuse, links that lead out by way of what is here; another one may lead there by way of it."""
        links, names = dict(self._tree.links), {place: name for name, place in self.renamed.items()}
        while out := [place for place in links if not self._leads_inside(links, place)]:
            for place in out:
                name, to = names.get(place, place), shown(links.pop(place))
                self.left_out[name] = f"a link to {to}, which leads out through a link in {self.root}"
                if not self._adapts:
                    raise LandingRefused(f"{shown(name)} is {self.left_out[name]}")
        self._tree = replace(self._tree, links=tuple(links.items()))

    def require_room(self, files: tuple[Arriving, ...]) -> None:
        """Raise StoreError when the disk has no room for these files."""
        with self.explained():
            disk = os.fstatvfs(self._top)
            free = disk.f_bavail * disk.f_frsize + self._staged_bytes()
        size = sum(file.size for file in files)
        if size > free:
            raise StoreError(
                f"{self.root} has {format_size(free)} free, and {format_size(size)} are to come",
                hint="free some space there, or name a folder elsewhere",
            )

    def has(self, file: Arriving, content: str) -> bool:
        """Whether the file is there already, with that content (`content_of`)."""
        with self.explained(), contextlib.suppress(FileNotFoundError):
            descriptor = opened_below(self._top, self._place(file))
            if descriptor is None:
                return False
            try:
                return os.fstat(descriptor).st_size == file.size and content_of(descriptor, self._heard) == content
            finally:
                os.close(descriptor)
        return False

    def part(self, file: Arriving, content: str) -> Part:
        """Return what the file is written into: begun earlier if one of that name and `content` was cut off."""
        with self.explained():
            return Part(self._staging, _part_name(file.name, content))

    def prove(self, file: Arriving, content: str) -> bool:
        """Take the part of a file as whole, if it has that content (`content_of`); whether it was."""
        with self.explained(), self.part(file, content) as part:
            proven = part.length() == file.size and content_of(part.descriptor, self._heard) == content
            if not proven:
                part.cut(0)
        if proven:
            self.keep(file, content)
        return proven

    def keep(self, file: Arriving, content: str, *, durable: bool = False) -> None:
        """Take the part of a file as whole and proven. With `durable`, it outlives a loss of power from then on."""
        with self.explained(), self.part(file, content) as part:
            # What others may write would be another's to change.
            os.fchmod(part.descriptor, file.mode & 0o755 | stat.S_IRUSR | stat.S_IWUSR)
            if file.mtime_ns is not None:
                moment = min(max(file.mtime_ns, 0), _LATEST_NS)
                os.utime(part.descriptor, ns=(moment, moment))
            if durable:
                os.fsync(part.descriptor)
        self._kept[self._place(file)] = _part_name(file.name, content)

    def _place(self, file: Arriving) -> str:
        return self.renamed.get(file.name, file.name)

    def settle(self) -> None:
        """Move everything that was kept to its place, and make the tree's folders and links."""
        with self.explained():
            for name, mode in sorted(self._tree.folders):
                os.close(self._folder(name, mode))
            with _Current(self) as current:
                for name in sorted(self._kept, key=parent_of):
                    self._move(self._kept[name], name, current)
                for name, target in sorted(self._tree.links):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink("link", dir_fd=self._staging)
                    os.symlink(target, "link", dir_fd=self._staging)
                    self._move("link", name, current)
        self._is_settled = True

    def _move(self, part: str, name: str, current: _Current) -> None:
        """Move a part, or a link, to its place; a file there makes room under another name if it is to be kept.

        What was kept so before is not kept again. A link there makes no room: what arrives was judged by what lay here,
        and may name that other name.
        """
        place, folder = name.rpartition("/")[2], current.folder_of(name)
        is_new = self._aside is not None and is_file(place, folder)
        is_new = is_new and not same((part, self._staging), (place, folder), self._heard)
        if (
            self._aside is not None
            and is_new
            and not has_equal(place, self._aside, current.names(), folder, self._heard)
        ):
            other = free_name(place, self._aside, folder)
            os.rename(place, other, src_dir_fd=folder, dst_dir_fd=folder)
            self.set_aside.append(self.root / parent_of(name) / other)
        os.rename(part, place, src_dir_fd=self._staging, dst_dir_fd=folder)

    def folder_of(self, name: str) -> int:
        """Return a descriptor of the folder that the name lies in; it and those above it are made if need be."""
        return self._folder(parent_of(name))

    def _folder(self, name: str, mode: int | None = None) -> int:
        at = os.dup(self._top)
        parts = name.split("/") if name else []
        for depth, part in enumerate(parts):
            try:
                below = made_and_opened(at, part, mode if depth == len(parts) - 1 else None)
            except OSError as error:
                raise self._in_the_way("/".join(parts[: depth + 1]), error) from error
            finally:
                os.close(at)
            at = below
        return at

    def _open(self) -> None:
        if self._top >= 0:
            return
        for folder in (*reversed(self.root.parents), self.root):
            if not folder.is_dir():
                folder.mkdir(exist_ok=True)
                self._made.append(folder)
        self._top = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for number in range(_STAGINGS):
            self._name = f"{STAGING}{number}"
            if (descriptor := self._own(self._name)) is not None:
                self._staging = descriptor
                return
        raise StoreError(f"{_STAGINGS} copies into {self.root} are under way", hint="wait for one of them")

    def _own(self, name: str) -> int | None:
        """Return that folder of the landing, open and held alone; None when it is another's."""
        is_new = True
        try:
            os.mkdir(name, 0o700, dir_fd=self._top)
        except FileExistsError:
            is_new = False
        try:
            descriptor = os.open(name, FOLDER, dir_fd=self._top)
        except OSError:  # a link, or no folder: nothing of ours
            return None
        about = os.fstat(descriptor)
        try:
            if not try_lock(descriptor) or (not is_new and (about.st_uid != os.geteuid() or about.st_mode & 0o077)):
                raise BlockingIOError
            there = os.stat(name, dir_fd=self._top, follow_symlinks=False)
            if there.st_ino != about.st_ino:
                raise BlockingIOError
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS):  # a disk that knows no locks
                os.close(descriptor)
                return None
        return descriptor

    def _clear(self, *, whole: bool) -> None:
        """Remove this landing's parts, or those alone that nothing is in; another's only once they are forgotten."""
        for name in os.listdir(self._staging):
            with contextlib.suppress(OSError):
                about = os.stat(name, dir_fd=self._staging, follow_symlinks=False)
                is_left = whole if self._is_own(name) else time.time() - about.st_ctime > _FORGOTTEN_S
                if is_left or about.st_size == 0:
                    os.unlink(name, dir_fd=self._staging)

    def _is_own(self, name: str) -> bool:
        return name == "link" or name[: len(_digest(""))] in self._own_parts

    def _staged_bytes(self) -> int:
        names = filter(self._is_own, os.listdir(self._staging))
        return sum(os.stat(name, dir_fd=self._staging, follow_symlinks=False).st_blocks * 512 for name in names)

    def _folds(self) -> bool:
        """Whether the disk takes names for the same that differ in case, or in how letters are composed."""
        os.close(os.open("probe-\u00c9", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=self._staging))
        found = [is_there(other, self._staging) for other in ("PROBE-\u00c9", "probe-\u00e9", "probe-E\u0301")]
        os.unlink("probe-\u00c9", dir_fd=self._staging)
        return any(found)

    def _require_places(self) -> None:
        """Raise StoreError where a file would take a folder's place, or a folder a file's or a link's."""
        known: dict[str, bool] = {"": True}
        for name in self._tree.names():
            self._is_folder(parent_of(name), known)
        for name, _ in self._tree.folders:
            self._is_folder(name, known)
        for name in (*(file.name for file in self._tree.files), *(name for name, _ in self._tree.links)):
            mode = self._mode(name) if known[parent_of(name)] else 0
            if mode and not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
                what = "a folder" if stat.S_ISDIR(mode) else "no file"
                raise StoreError(f"{self.root / name} is {what}; a file is to come there", hint="name another folder")

    def _is_folder(self, name: str, known: dict[str, bool]) -> bool:
        """Whether the folder is there; not there is well, too."""
        if name not in known:
            mode = self._mode(name) if self._is_folder(parent_of(name), known) else 0
            if mode and not stat.S_ISDIR(mode):
                raise self._in_the_way(name)
            known[name] = bool(mode)
        return known[name]

    def _mode(self, name: str) -> int:
        """Return what the path is, 0 for nothing; the folders above it are known to be folders."""
        try:
            return os.stat(name, dir_fd=self._top, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return 0

    def _leads_inside(self, links: Mapping[str, str], name: str) -> bool:
        """Whether a link leads inside by way of what is to come, and of what is there already."""
        at: list[str] = []
        to_go, hops = landing_of(name, links[name]) or [], 0
        while to_go and hops < _MOST_LINKS:
            at.append(to_go.pop(0))
            place = "/".join(at)
            said = links.get(place) or self._link_at(place)
            if said is not None:
                inner = landing_of(place, said)
                if inner is None:  # one of the user's own, which may come back
                    return self._is_inside("/".join([*at, *to_go]))
                at, to_go, hops = [], [*inner, *to_go], hops + 1
        return True  # or in a circle: that leads nowhere

    def _link_at(self, place: str) -> str | None:
        try:
            return os.readlink(place, dir_fd=self._top)
        except OSError:
            return None

    def _is_inside(self, place: str) -> bool:
        real = os.path.realpath(self.root)
        return f"{os.path.realpath(self.root / place)}/".startswith(f"{real.rstrip('/')}/")

    def _in_the_way(self, name: str, error: OSError | None = None) -> StoreError:
        place = self.root / name
        if error is not None and error.errno not in (errno.ELOOP, errno.ENOTDIR, errno.EEXIST):
            return StoreError(f"{place}: {error.strerror}", hint="name another folder")
        if place.is_symlink():
            return StoreError(f"{place} is a link; files go into folders", hint=f"rm {place}")
        return StoreError(f"{place} is no folder; files are to come into it", hint="name another folder")

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Have errors of the disk met here be StoreErrors."""
        try:
            yield
        except OSError as error:
            full, size = error.errno in _FULL, sum(file.size for file in self._tree.files)
            what = f"; {format_size(size)} are to come" if full and size else ""
            hint = "free some space there" if full else "name a folder that you may write to"
            raise StoreError(f"cannot write to {self.root}: {error.strerror}{what}", hint=hint) from error


class _Current:
    """The folder that was needed last stays open: most files lie beside the one before."""

    def __init__(self, landing: Landing) -> None:
        self._landing = landing
        self._descriptor = -1
        self._folder = ""
        self._names: list[str] | None = None

    def __enter__(self) -> _Current:
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def folder_of(self, name: str) -> int:
        if self._descriptor < 0 or self._folder != parent_of(name):
            opened = self._landing.folder_of(name)
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor, self._folder, self._names = opened, parent_of(name), None
        return self._descriptor

    def names(self) -> list[str]:
        """Return what that folder holds, in order; read once, for all of its files may differ."""
        if self._names is None:
            self._names = sorted(os.listdir(self._descriptor))
        return self._names


# Names that a disk cannot have beside each other, for it takes them for the same.


def unfolded(tree: Tree) -> dict[str, str]:
    """Return the names of a tree that come under others, with these: one of those that are alike stays as it is.

    The same tree has the same ones whenever it comes.
    """
    places, taken = {"": ""}, set[str]()
    own = {fold(name) for name in tree.names()}

    def find(name: str) -> str:
        if name not in places:
            as_it_is = "/".join(filter(None, (find(parent_of(name)), name.rpartition("/")[2])))
            endings = (f".{number}" for number in itertools.count(2))
            free = (one for one in endings if not {fold(as_it_is + one), fold(name + one)} & (taken | own))
            places[name] = as_it_is if fold(as_it_is) not in taken else as_it_is + next(free)
            taken.add(fold(places[name]))
        return places[name]

    for name in sorted(tree.names()):
        find(name)
    return {name: place for name, place in places.items() if place != name}


def placed(tree: Tree, renamed: Mapping[str, str]) -> Tree:
    """Return the tree by its new names; a link leads to what it led to."""

    def place_of(name: str) -> str:
        if name in renamed or not name:
            return renamed.get(name, "")
        return "/".join(filter(None, (place_of(parent_of(name)), name.rpartition("/")[2])))

    def leading(name: str, target: str) -> str:
        led = "/".join(landing_of(name, target) or ())
        if name not in renamed and place_of(led) == led:
            return target
        return posixpath.relpath(f"/{place_of(led)}", f"/{parent_of(place_of(name))}")

    return Tree(
        files=tuple(replace(file, name=place_of(file.name)) for file in tree.files),
        links=tuple((place_of(name), leading(name, target)) for name, target in tree.links),
        folders=tuple((place_of(name), mode) for name, mode in tree.folders),
    )


def _part_name(name: str, content: str) -> str:
    return _digest(name) + _digest(content)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:32]
