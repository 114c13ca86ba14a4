"""A script that saves by itself, killed with its keeper at any call of its, or at random with or without it.

No commit is ever torn.
"""

from __future__ import annotations

import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.prove.goal import Figure, Form, Goal
from tests.standins.befalling import Fault, environment
from tests.standins.kept_script import KeptScript, until

_TRIALS = {Form.SHORT: 6, Form.LONG: 90}
_AT_ONCE = 3
_KINDS = ("file", "hf", "done")
_VICTIMS = ("script", "keeper", "both")
_STEPS = 60
_PAUSE_S = 0.02  # of 31 pauses from save to save, 21 lie within a save in four files
_LONGEST_S = 3.0
_FEW_STEPS, _SHORT_PAUSE_S = 30, 0.005  # three saves


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What came of a trial: `wrong` says what did not hold, `torn` whether a save was half done at the kill."""

    name: str
    wrong: str | None
    torn: bool
    committed: bool


def run(form: Form) -> Iterator[Figure]:
    """Yield what went wrong, and in how many trials the kill met something."""
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(_AT_ONCE) as pool:
        folder = Path(name).resolve()
        found = list(pool.map(lambda seed: _tried(folder / str(seed), seed), range(_TRIALS[form])))
        struck = list(pool.map(lambda point: _struck(folder, *point), _points(folder, form)))
    for one in (*found, *struck):
        if one.wrong is not None:
            sys.stderr.write(f"ckpt-directory: {one.name}: {one.wrong}\n")
    yield Figure(name="ckpt-directory", value=sum(one.wrong is not None for one in (*found, *struck)), limit=0)
    yield Figure(name="ckpt-directory.kills", value=len(found), limit=_TRIALS[form], least=True)
    least = 3 if form is Form.SHORT else 100
    yield Figure(name="ckpt-directory.calls", value=len(struck), limit=least, least=True)
    if form is Form.LONG:  # chance has to do with these
        torn, committed = sum(one.torn for one in found), sum(one.committed for one in found)
        yield Figure(name="ckpt-directory.torn-at-the-kill", value=torn, limit=24, least=True)
        yield Figure(name="ckpt-directory.committed-before", value=committed, limit=24, least=True)


def _tried(folder: Path, seed: int) -> _Found:
    draw = random.Random(seed)
    script = KeptScript(folder, kind=_KINDS[seed % 3])
    victim, same_node = _VICTIMS[seed // 3 % 3], draw.random() < 0.5
    moment_s = draw.uniform(0.0, _LONGEST_S)
    name = f"seed {seed}: {script.kind}, {victim} killed {moment_s:.3f} s after the script began"
    try:
        script.start(steps=_STEPS, pause_s=_PAUSE_S)
        until(lambda: "begins at 0" in script.said(), "the script begins")
        time.sleep(moment_s)
        _strike(script, victim)
        torn, committed = _is_torn(script), bool(script.committed())
        wrong = _wrong(script) or _wrong_after(script, same_node=same_node)
    finally:
        script.kill()
    return _Found(name=name, wrong=wrong, torn=torn, committed=committed)


def _points(folder: Path, form: Form) -> Iterator[tuple[str, int]]:
    """Yield the calls to the disk that a keeper makes in the store, by the kind of script; in the short form three."""
    for kind in _KINDS if form is Form.LONG else ("hf",):
        script = _script_to_strike(folder / f"{kind}-calls", kind)
        script.start(steps=_FEW_STEPS, pause_s=_SHORT_PAUSE_S, **_fault(script, "none", 0))
        assert script.ended() == 0, script.said()
        calls = (script.folder / "calls").stat().st_size
        yield from ((kind, at) for at in range(1, calls + 1, 1 if form is Form.LONG else calls // 3))


def _struck(folder: Path, kind: str, at: int) -> _Found:
    """Kill the keeper and the script at the keeper's call of that number to the disk below the store."""
    script = _script_to_strike(folder / f"{kind}-{at}", kind)
    try:
        script.start(steps=_FEW_STEPS, pause_s=_SHORT_PAUSE_S, **_fault(script, "die", at))
        code = script.ended()
        torn, committed = _is_torn(script), bool(script.committed())
        # How often it looks at what it keeps is the clock's affair, so that the last calls may not come.
        wrong = None if code in {0, -9} else f"it ended with {code}"
        wrong = wrong or _wrong(script) or _wrong_after(script, same_node=at % 2 == 0)
    finally:
        script.kill()
    name = f"{kind}, the keeper killed with the script at its call {at} to the store"
    return _Found(name=name, wrong=wrong, torn=torn, committed=committed)


def _script_to_strike(folder: Path, kind: str) -> KeptScript:
    return KeptScript(folder, kind=kind, settle_s=0.05)


def _fault(script: KeptScript, kind: str, at: int) -> dict[str, str]:
    below, calls = str(script.folder / "store"), str(script.folder / "calls")
    return environment(Fault(kind=kind, first=at, last=at, below=below, calls=calls), script.folder / "first")


def _strike(script: KeptScript, victim: str) -> None:
    if victim == "script":
        script.kill_script()
        script.ended()
    elif victim == "keeper":
        script.kill_watcher(then_s=0.3)
    else:
        script.kill()


def _wrong(script: KeptScript) -> str | None:
    newest = script.committed()[:1]
    if script.step() > (newest[0].commit.step if newest else 0):
        return f"step {script.step()} was told to be saved, and the newest is {newest}"
    return script.wrong()


def _wrong_after(script: KeptScript, *, same_node: bool) -> str | None:
    """The next attempt begins with the newest commit, whatever lies on the disk, and comes to the end."""
    saved = script.newest_content()
    if not same_node:
        script.lose_the_disk()
    script.start(steps=_STEPS, pause_s=0.002)
    code = script.ended()
    began = re.search(r"begins at (\d+)", script.said())
    if code != 0 or began is None:
        return f"the next attempt ended with {code}: {script.said()[-500:]}"
    if int(began[1]) != saved:
        return f"step {saved} was saved, and the next attempt began at {began[1]}"
    wrong = script.wrong()
    if wrong is None and script.newest_content() != _STEPS:
        return f"the last save is that of step {script.newest_content()}"
    return wrong


def _is_torn(script: KeptScript) -> bool:
    """Whether the newest save on the disk is not whole."""
    return bool(script.torn())


GOAL = Goal(
    promise="a script that saves by itself and its keeper, killed together at any call of its to the store, or "
    "each or both at random: the newest commit is one whole save, and the next attempt begins with it",
    real="the keeper's process, the script's, the directory store, SIGKILL, the disk as it was left",
    simulated="the node: the attempt is started by hand; the script writes small files in pieces, with pauses",
    run=run,
)
