"""`ci init`: a repository's own copy of all that its CI runs."""

from __future__ import annotations

from pathlib import Path

from gpucloud.cli.render import say, say_json, tell
from gpucloud.domain.vendoring import Forge
from gpucloud.wiring import install_pipeline


def init(*, github: bool, gitlab: bool, force: bool, as_json: bool) -> int:
    """Put pipelines, gpucloud's wheel and the lock into the repository; return the exit code."""
    chosen = {Forge.GITHUB: github, Forge.GITLAB: gitlab}
    done = install_pipeline(Path.cwd(), frozenset(forge for forge, wanted in chosen.items() if wanted), force=force)
    found = done.update
    written = (*found.written, *found.in_the_way)
    if as_json:
        lists = {"written": written, "removed": found.removed, "kept": found.kept}
        say_json({name: list(paths) for name, paths in lists.items()} | {"wheel": done.wheel, "sha256": done.sha256})
    else:
        say("\n".join([f"wrote {path}" for path in written] + [f"removed {path}" for path in found.removed]))
    for path in found.kept:
        tell(f"{path} was edited here and stays; what gpucloud would write is as it was")
    if done.to_add is not None:
        name, text = done.to_add
        for line in (f"{name} is yours; add to it:", *text.rstrip().splitlines()):
            tell(line)
    tell(f"{done.wheel} has SHA-256 {done.sha256}; commit all of it (`git add -f` where *.whl is ignored)")
    return 0
