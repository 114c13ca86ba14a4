"""Everything here runs over an emulated AWS: `emulated`, several at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.aws import Lab

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.emulated)


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One emulated AWS for a module."""
    with Lab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


@pytest.fixture
def lab(standing: Lab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """It, without faults, as the one that this process meets."""
    standing.faults.clear()
    for key, value in standing.settings.items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    return standing
