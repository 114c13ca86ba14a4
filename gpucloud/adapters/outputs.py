"""Brings a job's outputs home: from the folder that its script ran in to a folder beside the job file."""

from __future__ import annotations

import os
from pathlib import Path

from gpucloud.adapters.copying import Copier, Listing
from gpucloud.adapters.localfiles import inside
from gpucloud.domain.errors import StoreError
from gpucloud.domain.launch import attempt_folder
from gpucloud.ports import Host


class OutputsFolder:
    """Implements `Outputs`: `paths` (patterns too), relative to the code folder, arrive under `target` as they were.

    `python` is the interpreter on nodes. What was cut off goes on with the next call; what is here already stays.
    """

    def __init__(self, paths: tuple[str, ...], target: Path, *, python: str = "python3") -> None:
        self._paths = paths
        self._target = target
        self._python = python

    def bring_home(self, host: Host, code: str) -> tuple[str, ...]:
        """Return what arrived, as local paths; a path that the script did not make is left out.

        A link that stays inside the code folder arrives as a link; one that leads out to a file, as that file.
        """
        return self._bring(host, code, self._paths, self._target)

    def bring_profile(self, host: Host, attempt: int) -> tuple[str, ...]:
        """Return what of the attempt's profiles arrived from the host, below `profile/attempt-<n>`."""
        folder = attempt_folder(host.node.root, attempt) + "/profile"
        listed = host.run(("sh", "-c", 'cd "$1" 2>/dev/null && ls', "sh", folder))
        names = tuple(name for name in listed.stdout.decode(errors="replace").split() if name.startswith("rank-"))
        return self._bring(host, folder, names, self._target / "profile" / f"attempt-{attempt}")

    def _bring(self, host: Host, folder: str, paths: tuple[str, ...], target: Path) -> tuple[str, ...]:
        if not paths:
            return ()
        copier = Copier(host, folder, python=self._python)
        found = copier.listing(paths)
        try:
            target.mkdir(parents=True, exist_ok=True)
            for inner in found.folders:
                inside(target, inner).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"outputs cannot be written to {target}: {error}", hint="free some space") from error
        _refuse_detours(found, target)
        copier.fetch(
            [(file, inside(target, file.path)) for file in found.files],
            [(inside(target, path), link) for path, link in found.links],
        )
        tops = dict.fromkeys(path.rstrip("/") for path in paths if (target / path).exists())
        others = dict.fromkeys(file.path for file in found.files if not any(_is_below(file.path, top) for top in tops))
        return tuple(str(target / path) for path in (*tops, *others))


def _refuse_detours(found: Listing, target: Path) -> None:
    """Nothing is written through a link that lies here: it could lead out of the target."""
    for file in found.files:
        for above in list((target / file.path).parents)[: file.path.count("/")]:
            if above.is_symlink():
                raise StoreError(f"{above} is a link; outputs go into a folder", hint=f"rm {above}")
    for path, link in found.links:
        real = os.path.normpath((target / path).parent / link)
        if not real.startswith(f"{target}{os.sep}"):
            raise StoreError(f"outputs: the link {path} -> {link} leaves {target}", hint="leave it out")


def _is_below(path: str, top: str) -> bool:
    return path == top or path.startswith(f"{top}/")
