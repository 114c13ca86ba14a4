"""Rules of all tests: no example is too slow on a busy machine, and an engine that is missing is named."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from tests.engines import ENGINES

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("engine"):
        missing = ENGINES[mark.kwargs["name"]].missing()
        if missing:
            pytest.fail(f"{mark.kwargs['name']} is not here: {missing}", pytrace=False)
