"""Which tests need which engine, and what is said where one is missing."""

from __future__ import annotations

import re

from tests import engines
from tests.engines import ENGINES, TESTS, Engine, files_with


def test_an_engine_that_is_missing_is_told_with_what_installs_it(monkeypatch):
    monkeypatch.setattr(engines, "_is_program", {"gcc"}.__contains__)
    both = Engine(
        shows="", programs={"gcc": "gcc", "mpirun": "openmpi-bin"}, modules={"no_such": "no-such", "re": "re"}
    )

    assert both.missing() == "apt-get install -y openmpi-bin && pip install no-such"
    assert Engine(shows="", tools={"checkov": "checkov"}).missing() == "pipx install checkov"
    assert Engine(shows="", programs={"gcc": "gcc"}, modules={"re": "re"}).missing() is None


def test_every_engine_is_needed_by_some_test_and_every_mark_names_one():
    marks = {
        name
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"mark\.engine\(name=\"(\w+)\"", path.read_text())
    }

    assert marks == set(ENGINES)
    assert files_with("openmpi") == [str(TESTS / "functional" / name) for name in ("test_launchers.py", "test_mpi.py")]
