"""Brings a job's outputs home: from the folder that its script ran in to a folder beside the job file."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from gpucloud.domain.errors import RemoteCommandFailed, StoreError
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
        if not self._paths:
            return ()
        done = host.run(("sh", "-c", _PACK, "sh", code, *self._paths), timeout_s=_LIMIT_S)
        if done.exit_code != 0:
            raise RemoteCommandFailed(f"outputs: {done.stderr.decode(errors='replace').strip()}")
        try:
            self._target.mkdir(parents=True, exist_ok=True)
            with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
                archive.extractall(self._target, filter="data")
        except (OSError, tarfile.TarError) as error:
            raise StoreError(f"outputs cannot be written to {self._target}: {error}", hint="free some space") from error
        return tuple(str(self._target / path) for path in self._paths if (self._target / path).exists())
