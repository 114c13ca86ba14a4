"""Where Terraform's providers lie on this machine, so that tests need no registry; and one that goes on running."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

REGISTRY = "registry.terraform.io"
# PR_SET_PDEATHSIG, prctl(2): what becomes of this process has it too.
_DIE_WITH_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); os.execv(sys.argv[1], sys.argv[1:])"
_ATTACH = re.compile(r"TF_REATTACH_PROVIDERS='(.+)'")


@contextlib.contextmanager
def standing_provider(env: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Run AWS's provider for all Terraform commands of the block, one after the other; give what attaches them to it.

    Else each command starts its own, and most of what that computes is the same each time: its 675 MB are read for
    their hash, and its schemas are made. A plan computes 2.5 s instead of 5.1, an `init` 0.1 s instead of 1.5. It has
    the environment of its start: commands with other credentials, or of another AWS, need another. Nothing is given
    where it is not there unpacked: then each command starts its own.
    """
    programs = sorted(
        (plugin_folder() or Path("/nowhere")).glob(f"{REGISTRY}/hashicorp/aws/*/*/terraform-provider-aws*")
    )
    if len(programs) != 1:
        yield {}
        return
    # It is configured anew by each command, and refuses a bundle of certificates the second time.
    kept = {name: value for name, value in env.items() if name != "AWS_CA_BUNDLE"} | {"GOGC": "400"}
    with subprocess.Popen(
        [sys.executable, "-ISc", _DIE_WITH_PARENT, str(programs[0]), "-debug"], env=kept,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        try:
            found = next(filter(None, map(_ATTACH.search, process.stdout or ())), None)
            assert found is not None, f"{programs[0]} -debug ended"
            yield {"TF_REATTACH_PROVIDERS": found[1]}
        finally:
            process.send_signal(signal.SIGINT)  # it removes its socket
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


def plugin_folder() -> Path | None:
    """Return the folder that holds a mirror of providers: GPUCLOUD_TF_PLUGIN_DIR, else the first usual place."""
    named = os.environ.get("GPUCLOUD_TF_PLUGIN_DIR")
    if named:
        return Path(named)
    places = [Path.home() / ".terraform.d/plugins", Path("/usr/local/share/terraform/plugins")]
    places += [folder for folder in sorted(Path("/").iterdir()) if folder.name not in {"proc", "sys", "dev"}]
    for place in places:
        for candidate in (place, *_below(place)):
            if _readable(candidate / REGISTRY):
                return candidate
    return None


def _below(place: Path) -> list[Path]:
    try:
        return sorted(entry for entry in place.iterdir() if entry.is_dir())
    except OSError:
        return []


def _readable(folder: Path) -> bool:
    try:
        return folder.is_dir()
    except OSError:
        return False
