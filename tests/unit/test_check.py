"""What `python -m tests.check` prepares for what it starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import check
from tests.conftest import names_mark


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """A check in an environment of its own, with `tmp_path` for the memory."""
    monkeypatch.setattr(os, "environ", {"PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": "/tmp"})
    monkeypatch.setattr(check, "MEMORY", tmp_path)
    monkeypatch.setattr(check, "ENOUGH_BYTES", 1)
    return os.environ


def test_files_of_the_tests_are_in_memory_while_they_run_and_gone_after(environment, tmp_path):
    with check.quick_files():
        folder = Path(environment["TMPDIR"])
        (folder / "left").write_text("by a test")
        assert folder.parent == tmp_path
        assert "PYTHONDONTWRITEBYTECODE" not in environment
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("memory", [Path("/nowhere"), Path("/proc")])
def test_where_there_is_no_memory_for_files_they_stay_on_the_disk(environment, monkeypatch, memory):
    monkeypatch.setattr(check, "MEMORY", memory)
    with check.quick_files():
        assert environment["TMPDIR"] == "/tmp"


def test_a_memory_with_little_room_is_left_to_others(environment, monkeypatch):
    monkeypatch.setattr(check, "ENOUGH_BYTES", 1 << 62)
    with check.quick_files():
        assert environment["TMPDIR"] == "/tmp"


def test_a_file_is_opened_for_a_mark_that_it_or_its_folder_names():
    tests = check.ROOT / "tests"
    assert names_mark(tests / "functional/aws/test_aws_wall.py", "emulated")
    assert names_mark(tests / "functional/test_metrics.py", "alone")
    assert not names_mark(tests / "functional/test_metrics.py", "emulated")
    assert not names_mark(tests / "unit/test_check.py", "alone")
