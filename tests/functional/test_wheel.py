"""The wheel holds what the installed program needs beside its code."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gpucloud.adapters.handbook import IN_ORDER

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_modules_and_templates_travel_in_the_wheel(tmp_path: Path) -> None:
    """Builds a wheel (build isolation fetches hatchling), which no look at pyproject.toml can replace."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("gpucloud-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert archive.testzip() is None
    bundled = [*(ROOT / "terraform").rglob("*.tf"), *(ROOT / "templates").rglob("*.yaml")]
    assert {f"gpucloud/bundled/{path.relative_to(ROOT)}" for path in bundled} <= names
    assert {f"gpucloud/docs/{file}" for file in IN_ORDER} <= names
    assert "gpucloud/py.typed" in names
    assert [name for name in names if ".terraform/" in name or name.endswith(".tfstate")] == []
