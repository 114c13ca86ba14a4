"""What travels with the package is found in a checkout and in an installed wheel."""

from __future__ import annotations

from pathlib import Path

import pytest

import gpucloud
from gpucloud.adapters.home import bundled
from gpucloud.domain.errors import GpucloudError


def test_a_checkout_has_them_at_its_root() -> None:
    assert bundled("terraform", "local", "main.tf").is_file()
    assert bundled("templates", "gpucloud.yaml").is_file()


def test_a_wheel_has_them_inside_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tmp_path / "gpucloud" / "bundled" / "terraform"
    inside.mkdir(parents=True)
    (tmp_path / "terraform").mkdir()
    monkeypatch.setattr(gpucloud, "__file__", str(tmp_path / "gpucloud" / "__init__.py"))
    assert bundled("terraform") == inside


def test_a_broken_installation_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpucloud, "__file__", str(tmp_path / "gpucloud" / "__init__.py"))
    with pytest.raises(GpucloudError, match="this installation of gpucloud lacks terraform/local"):
        bundled("terraform", "local")
