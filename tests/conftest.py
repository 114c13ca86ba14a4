"""A test that needs an engine fails where it is missing, with the command that installs it."""

from __future__ import annotations

import pytest

from tests.engines import ENGINES


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("engine"):
        missing = ENGINES[mark.kwargs["name"]].missing()
        if missing:
            pytest.fail(f"{mark.kwargs['name']} is not here: {missing}", pytrace=False)
