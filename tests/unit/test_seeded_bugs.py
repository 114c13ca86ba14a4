"""The table of seeded bugs follows the product: every function is there, and whoever is to find its bug exists."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from datetime import datetime, timezone
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from operator import attrgetter
from pathlib import Path
from types import ModuleType

import pytest

from gpucloud.domain.job.spec import Market
from gpucloud.domain.offer import Pool
from gpucloud.domain.state.state import UsageInterval
from tests.faults.bugs import bugs
from tests.faults.seeded import Bug
from tests.prove.__main__ import GOALS, ROOT

_LIVES = next(bug for bug in bugs() if bug.name == "vanished-machine-forgotten")


@pytest.mark.parametrize("bug", bugs(), ids=lambda bug: bug.name)
def test_a_seeded_bug_changes_the_product_of_now_and_somebody_is_named_to_find_it(bug: Bug) -> None:
    assert bug.stale() is None
    kind, *files = bug.found_by
    assert all((ROOT / file).is_file() for file in files) if kind == "pytest" else kind in GOALS


@pytest.mark.parametrize("bug", bugs(), ids=lambda bug: bug.name)
def test_a_seeded_bug_can_be_loaded_where_it_is_put(bug: Bug, tmp_path: Path) -> None:
    changed = _changed(bug, tmp_path)
    put = getattr(changed, bug.patch.__name__)
    found = attrgetter(bug.target)(changed)
    assert isinstance(found, type | property) or found.__qualname__.startswith(f"{put.__name__}.<locals>.")


def test_no_two_bugs_have_one_name_and_some_are_quick() -> None:
    assert [name for name, times in Counter(bug.name for bug in bugs()).items() if times > 1] == []
    assert sum(bug.quick for bug in bugs()) >= 3


def test_a_bug_whose_function_or_module_is_gone_is_stale() -> None:
    assert "no attribute 'with_leaves'" in (replace(_LIVES, target="with_leaves").stale() or "")
    assert "no attribute 'gone'" in (replace(_LIVES, target="with_intervals.gone").stale() or "")
    assert "No module named" in (replace(_LIVES, module="gpucloud.domain.leaves").stale() or "")


def test_a_bug_breaks_the_copy_and_not_the_product(tmp_path: Path) -> None:
    pool = Pool(instance_type="t", zone="r1", market=Market.SPOT)
    interval = UsageInterval(node_id="n", pool=pool, launched_at=datetime(2026, 1, 1, tzinfo=timezone.utc))
    changed, own = _changed(_LIVES, tmp_path), import_module(_LIVES.module)
    assert (changed.with_intervals((interval,), ()), own.with_intervals((interval,), ())) == ((), (interval,))


def _changed(bug: Bug, folder: Path) -> ModuleType:
    """Return the module with the bug in it, loaded beside the product's own."""
    path = folder.joinpath(*bug.module.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True)
    shutil.copyfile(ROOT / path.relative_to(folder), path)
    bug.put_into(folder)
    import_module(bug.module)  # where dataclasses look for the names of their fields' types
    spec = spec_from_file_location(bug.module, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
