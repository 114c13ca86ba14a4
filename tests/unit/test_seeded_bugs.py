"""The table of seeded bugs follows the product: every text is there once, and whoever is to find it exists."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.faults.bugs import Bug, bugs
from tests.prove.__main__ import GOALS, ROOT


@pytest.mark.parametrize("bug", tuple(bugs()), ids=lambda bug: bug.name)
def test_a_seeded_bug_changes_the_product_of_now_and_somebody_is_named_to_find_it(bug: Bug) -> None:
    assert bug.stale(ROOT) == ()
    kind, *files = bug.found_by
    assert all((ROOT / file).is_file() for file in files) if kind == "pytest" else kind in GOALS


def test_no_two_bugs_have_one_name_and_three_are_quick() -> None:
    assert [name for name, times in Counter(bug.name for bug in bugs()).items() if times > 1] == []
    assert sum(bug.quick for bug in bugs()) == 3
