"""The proofs are strong enough: each of these seeded bugs, put into a copy of the product, is found by a named one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.prove.goal import Figure, Form, Goal

_ROOT = Path(__file__).resolve().parent.parent.parent
_LIMIT_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One bug: a text in a file and what stands in its place; `found_by` are a goal's name or pytest's arguments."""

    name: str
    file: str
    text: str
    bug: str
    found_by: tuple[str, ...]
    quick: bool = False


_TESTS = "tests/unit"
_LEASE_TESTS = "tests/functional/test_lease.py"
MUTANTS = (
    Mutant(
        name="plain-put",
        file="gpucloud/usecases/jobstore.py",
        text="_bytes(state), if_version=version)",
        bug="_bytes(state))",
        found_by=("lease",),
        quick=True,
    ),
    Mutant(
        name="lease-never-expires",
        file="gpucloud/usecases/lease.py",
        text="    return stored.store_time - stored.modified >= timedelta(seconds=state.lease_s)",
        bug="    return False",
        found_by=("pytest", _LEASE_TESTS),
    ),
    Mutant(
        name="epoch-does-not-rise",
        file="gpucloud/usecases/lease.py",
        text="epoch=state.epoch + 1",
        bug="epoch=state.epoch",
        found_by=("lease",),
    ),
    Mutant(
        name="nonce-not-compared",
        file="gpucloud/usecases/lease.py",
        text="if loaded is None or loaded[0].nonce not in self._unsure:",
        bug="if loaded is not None or self._unsure:",
        found_by=("lease",),
    ),
    Mutant(
        name="foreign-nonce-accepted",
        file="gpucloud/usecases/lease.py",
        text="if loaded is None or loaded[0].nonce not in self._unsure:",
        bug="if loaded is None:",
        found_by=("lease",),
    ),
    Mutant(
        name="fence-skipped",
        file="gpucloud/agent/levels.py",
        text="        if desired.epoch < self.epoch:\n            return\n",
        bug="",
        found_by=("lease",),
        quick=True,
    ),
    Mutant(
        name="launch-before-arm",
        file="gpucloud/domain/supervision/between.py",
        text="    if payable is not None and _must_arm(goal, seen, rules):",
        bug="    if group.size == goal.nodes and payable is not None and _must_arm(goal, seen, rules):",
        found_by=("pytest", f"{_TESTS}/test_reconcile.py"),
        quick=True,
    ),
    Mutant(
        name="reserve-forgotten",
        file="gpucloud/domain/supervision/prepaid.py",
        text="    spendable = left_usd - reserve_usd(nodes, cap_usd_per_hour, wall)",
        bug="    spendable = left_usd",
        found_by=("budget",),
    ),
    Mutant(
        name="budget-by-the-own-clock",
        file="gpucloud/usecases/supervise.py",
        text="clock=StoreClock(world.clock, world.jobs, watcher.story)",
        bug="clock=world.clock",
        found_by=("storm",),
    ),
    Mutant(
        name="replacement-not-counted",
        file="gpucloud/usecases/observe.py",
        text="return self.cashier.payable_until(known, coming, now, self.world.rules.wall)",
        bug="return self.cashier.payable_until(state, self.goal.nodes, now, self.world.rules.wall)",
        found_by=("storm",),
    ),
    Mutant(
        name="shut-off-not-lowered-before-detaching",
        file="gpucloud/domain/supervision/upkeep.py",
        text="            return lower or Detach(node_id=counted[0])",
        bug="            return Detach(node_id=counted[0])",
        found_by=("storm",),
    ),
    Mutant(
        name="dead-in-bootstrap-is-the-users-error",
        file="gpucloud/usecases/prepare.py",
        text="            self._unreachable.add(node.id)\n",
        bug="            self._failures += 1\n",
        found_by=("storm",),
    ),
    Mutant(
        name="save-too-late",
        file="gpucloud/agent/reconcile.py",
        text="heard_at=before.heard_at if before else now",
        bug="heard_at=now",
        found_by=("budget-save",),
    ),
    Mutant(
        name="agent-does-not-save-before-the-wall",
        file="gpucloud/agent/decide.py",
        text="    if wall is Wall.NEAR and seen.prepaid is not None:",
        bug="    if False and wall is Wall.NEAR and seen.prepaid is not None:",
        found_by=("budget-save",),
    ),
    Mutant(
        name="oldest-checkpoint-restored",
        file="gpucloud/domain/manifest.py",
        text="return tuple(sorted(found, reverse=True))",
        bug="return tuple(sorted(found))",
        found_by=("lost-steps",),
    ),
    Mutant(
        name="own-failure-not-told-from-a-lost-peers",
        file="gpucloud/domain/supervision/during.py",
        text="    if taken is not None:\n        return taken\n",
        bug="",
        found_by=("storm",),
    ),
)


def run(form: Form) -> Iterator[Figure]:
    """Count the bugs that nothing found."""
    chosen = MUTANTS if form is Form.LONG else tuple(one for one in MUTANTS if one.quick)
    alive = [one.name for one in chosen if not _is_found(one)]
    for name in alive:
        sys.stderr.write(f"mutants: {name} was not found\n")
    yield Figure(name="mutants", value=len(alive), limit=0)
    yield Figure(name="mutants.bugs", value=len(chosen), limit=12 if form is Form.LONG else 3, least=True)


def _is_found(mutant: Mutant) -> bool:
    """Whether what should find the bug fails with it; a text that the file does not have is a fault of this table."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "repository"
        ignored = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", "dist", "shared")
        shutil.copytree(_ROOT, root, ignore=ignored, symlinks=True)
        path = root / mutant.file
        text = path.read_text(encoding="utf-8")
        if text.count(mutant.text) != 1:
            sys.stderr.write(f"mutants: {mutant.name}: its text is {text.count(mutant.text)} times in {mutant.file}\n")
            return False
        path.write_text(text.replace(mutant.text, mutant.bug), encoding="utf-8")
        return _fails(root, mutant.found_by)


def _fails(root: Path, found_by: tuple[str, ...]) -> bool:
    """Whether a pytest run ends with failed tests, or a goal with a figure that fails."""
    pytest = found_by[0] == "pytest"
    argv = (
        ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *found_by[1:])
        if pytest
        else (
            "-m",
            "tests.prove",
            "--here",
            "--short",
            *found_by,
        )
    )
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run((sys.executable, *argv), cwd=root, env=env, timeout=_LIMIT_S, capture_output=True)
    if pytest:
        return done.returncode == 1
    return any(line.startswith(b"FIGURE ") and line.endswith(b" fail") for line in done.stdout.splitlines())


GOAL = Goal(
    promise="every seeded bug is found by the goal or the tests that are named beside it",
    real="a copy of the product with one text changed; the short form of the goals, and tests",
    simulated="what those goals simulate",
    run=run,
)
