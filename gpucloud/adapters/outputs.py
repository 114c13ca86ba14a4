"""Brings a job's outputs home: from the folder that its script ran in to a folder beside the job file."""

from __future__ import annotations

import os
from pathlib import Path

from gpucloud.adapters.copying import Copier, Listing
from gpucloud.adapters.localfiles import inside
from gpucloud.domain.errors import StoreError
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
        if not self._paths:
            return ()
        copier = Copier(host, code, python=self._python)
        found = copier.listing(self._paths)
        try:
            self._target.mkdir(parents=True, exist_ok=True)
            for folder in found.folders:
                inside(self._target, folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"outputs cannot be written to {self._target}: {error}", hint="free some space") from error
        self._refuse_detours(found)
        copier.fetch(
            [(file, inside(self._target, file.path)) for file in found.files],
            [(inside(self._target, path), target) for path, target in found.links],
        )
        tops = dict.fromkeys(path.rstrip("/") for path in self._paths if (self._target / path).exists())
        others = dict.fromkeys(file.path for file in found.files if not any(_is_below(file.path, top) for top in tops))
        return tuple(str(self._target / path) for path in (*tops, *others))

    def _refuse_detours(self, found: Listing) -> None:
        """Nothing is written through a link that lies here: it could lead out of the target."""
        for file in found.files:
            for above in list((self._target / file.path).parents)[: file.path.count("/")]:
                if above.is_symlink():
                    raise StoreError(f"{above} is a link; outputs go into a folder", hint=f"rm {above}")
        for path, target in found.links:
            real = os.path.normpath((self._target / path).parent / target)
            if not real.startswith(f"{self._target}{os.sep}"):
                raise StoreError(f"outputs: the link {path} -> {target} leaves {self._target}", hint="leave it out")


def _is_below(path: str, top: str) -> bool:
    return path == top or path.startswith(f"{top}/")
