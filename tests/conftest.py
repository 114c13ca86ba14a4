"""Rules of all tests: no example is too slow on a busy machine, and an engine that is missing is named.

Each worker of pytest-xdist collects every test, which computes as long as hundreds of tests do. What is collected stays
to the end: no search for garbage looks at it. A run of the tests of one mark opens the files of that mark alone.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import botocore.session
import pytest
from hypothesis import HealthCheck, settings

from tests.engines import ENGINES

TESTS = Path(__file__).parent

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# What botocore knows of the services is read once, and not for each session of each test: EC2's part alone is 0.2 s.
botocore.session.create_loader = cache(botocore.session.create_loader)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--marked", metavar="MARK", help="open only test files that name this mark, or whose folder does")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    mark = config.getoption("--marked")
    return True if mark and collection_path.suffix == ".py" and not names_mark(collection_path, mark) else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for mark in ("alone", "emulated"):
        unseen = {item.path for item in items if item.get_closest_marker(mark)}
        if nameless := sorted(str(path) for path in unseen if not names_mark(path, mark)):
            raise pytest.UsageError(f"--marked={mark} would pass over {', '.join(nameless)}: name the mark there")


def names_mark(path: Path, mark: str) -> bool:
    """Whether the test file, or a conftest.py above it, puts this mark on a test."""
    above = [folder / "conftest.py" for folder in path.parents if TESTS in folder.parents]
    given = re.compile(rf"\bmark\.{mark}\b")
    return any(given.search(file.read_text()) for file in (path, *above) if file.is_file())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("engine"):
        missing = ENGINES[mark.kwargs["name"]].missing()
        if missing:
            pytest.fail(f"{mark.kwargs['name']} is not here: {missing}", pytrace=False)
