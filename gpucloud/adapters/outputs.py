"""Brings a job's outputs home: from the folder that its script ran in to a folder beside the job file."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from gpucloud.domain.errors import RemoteCommandFailed, StoreError
from gpucloud.domain.launch import attempt_folder
from gpucloud.ports import Host

_LIMIT_S = 600.0
_PACK = """cd "$1" || exit; shift
for path; do if [ -e "$path" ]; then printf '%s\\0' "$path"; fi; done | tar --null -cf - -T -"""


class OutputsFolder:
    """Implements `Outputs`: `paths`, relative to the code folder, arrive under `target` as they were."""

    def __init__(self, paths: tuple[str, ...], target: Path) -> None:
        self._paths = paths
        self._target = target

    def bring_home(self, host: Host, code: str) -> tuple[str, ...]:
        """Return what arrived, as local paths; a path that the script did not make is left out.

        Links and names that would leave the target are refused by Python's own `data` filter (PEP 706).
        """
        return _bring(host, code, self._paths, self._target)

    def bring_profile(self, host: Host, attempt: int) -> tuple[str, ...]:
        """Return what of the attempt's profiles arrived from the host, below `profile/attempt-<n>`."""
        folder = attempt_folder(host.node.root, attempt) + "/profile"
        listed = host.run(("sh", "-c", 'cd "$1" 2>/dev/null && ls', "sh", folder))
        names = tuple(name for name in listed.stdout.decode(errors="replace").split() if name.startswith("rank-"))
        return _bring(host, folder, names, self._target / "profile" / f"attempt-{attempt}")


def _bring(host: Host, folder: str, paths: tuple[str, ...], target: Path) -> tuple[str, ...]:
    if not paths:
        return ()
    done = host.run(("sh", "-c", _PACK, "sh", folder, *paths), timeout_s=_LIMIT_S)
    if done.exit_code != 0:
        raise RemoteCommandFailed(f"outputs: {done.stderr.decode(errors='replace').strip()}")
    try:
        target.mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(target, filter="data")
    except (OSError, tarfile.TarError) as error:
        raise StoreError(f"outputs cannot be written to {target}: {error}", hint="free some space") from error
    return tuple(str(target / path) for path in paths if (target / path).exists())
