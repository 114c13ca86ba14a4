"""Brings a job's outputs home: from the folder that its script ran in to a folder beside the job file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from gpucloud.adapters.copying import Copier, Listing, Progress
from gpucloud.domain.arriving import shown
from gpucloud.domain.launch import attempt_folder
from gpucloud.domain.state import MissingOutput
from gpucloud.ports import Brought, Host

_NAME_CHARS = 200
"""A node chooses its names: a longer one is nothing to tell."""
_ELSEWHERE = ", which leads elsewhere or is no file"


class OutputsFolder:
    """Implements `Outputs`: `paths` (patterns too), relative to the code folder, arrive under `target` as they were.

    `python` is the interpreter on nodes. What was cut off goes on with the next call; what is here already stays.
    """

    def __init__(self, paths: tuple[str, ...], target: Path, *, python: str = "python3") -> None:
        self._paths = paths
        self._target = target
        self._python = python

    def bring_home(self, host: Host, code: str, moves: Callable[[], None] | None = None) -> Brought:
        """Return what arrived, as local paths, and what the script did not make.

        A link that stays inside the code folder arrives as a link; one that leads out to a file, as that file.
        """
        if not self._paths:
            return Brought()
        progress = None if moves is None else lambda *_: moves()
        arrived, found = self._bring(host, code, self._paths, "", progress)
        return Brought(paths=arrived, missing=(*_not_there(found), *_left_out(found)))

    def bring_profile(self, host: Host, attempt: int) -> tuple[str, ...]:
        """Return what of the attempt's profiles arrived from the host, below `profile/attempt-<n>`."""
        folder = f"{attempt_folder(host.node.root, attempt)}/profile"
        return self._bring(host, folder, ("rank-*",), f"profile/attempt-{attempt}")[0]

    def _bring(
        self, host: Host, base: str, paths: tuple[str, ...], below: str, progress: Progress | None = None
    ) -> tuple[tuple[str, ...], Listing]:
        copier = Copier(host, base, python=self._python, progress=progress)
        found = copier.listing(paths)

        def place_of(top: str) -> str:
            return "/".join((*below.split("/"), *(part for part in top.split("/") if part != "."))).strip("/")

        copier.fetch(found, self._target, place_of)
        tops = dict.fromkeys(place_of(top) for top in found.asked_folders)
        files = dict.fromkeys(place_of(file.top) for file in found.files if not file.inner)
        others = [name for name in files if not any(_is_below(name, top) for top in tops)]
        return tuple(str(self._target / name) for name in (*tops, *others)), found


def _not_there(found: Listing) -> Iterator[MissingOutput]:
    for path, near in found.missing:
        tellable = near is not None and near.isprintable() and len(near) <= _NAME_CHARS
        yield MissingOutput(path=path, why="is not there", nearest=near if tellable else None)


def _left_out(found: Listing) -> Iterator[MissingOutput]:
    """Yield one for each output of which something was left out, however much."""
    left_out: dict[str, list[str]] = {}
    for asked, path in found.outside:
        left_out.setdefault(asked, []).append(path)
    for asked, (first, *more) in left_out.items():
        name = first if first.isprintable() and len(first) <= _NAME_CHARS else shown(first)
        many = f" and {len(more)} more, which lead elsewhere or are no files"
        yield MissingOutput(path=asked, why=f"came without {name}{many if more else _ELSEWHERE}")


def _is_below(path: str, top: str) -> bool:
    return path == top or not top or path.startswith(f"{top}/")
