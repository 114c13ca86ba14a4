"""Brings a job's outputs home: from the folder that its script ran in to a folder beside the job file."""

from __future__ import annotations

from pathlib import Path

from gpucloud.adapters.copying import Copier
from gpucloud.adapters.localfiles import inside, refuse_detours
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

    def _bring(self, host: Host, base: str, paths: tuple[str, ...], target: Path) -> tuple[str, ...]:
        if not paths:
            return ()
        copier = Copier(host, base, python=self._python)
        found = copier.listing(paths)
        try:
            target.mkdir(parents=True, exist_ok=True)
            folders = [inside(target, inner) for inner in found.folders]
            refuse_detours(target, (folder for folder in folders if folder != target), ())
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"outputs cannot be written to {target}: {error}", hint="free some space") from error
        copier.fetch(
            [(file, inside(target, file.path)) for file in found.files],
            [(inside(target, path), link) for path, link in found.links],
            root=target,
        )
        tops = dict.fromkeys(path.rstrip("/") for path in paths if (target / path).exists())
        others = dict.fromkeys(file.path for file in found.files if not any(_is_below(file.path, top) for top in tops))
        return tuple(str(target / path) for path in (*tops, *others))


def _is_below(path: str, top: str) -> bool:
    return path == top or path.startswith(f"{top}/")
