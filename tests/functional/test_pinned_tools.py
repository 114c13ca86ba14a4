"""Fetching a pinned program, from a real index on loopback and from an address."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import pytest

from gpucloud.agent.layer import tools
from gpucloud.agent.layer.environment import Places
from gpucloud.agent.layer.tools import Unreachable, fetch, fetch_uv
from gpucloud.domain.node.layer import UV_VERSION, PinnedFile
from tests.standins.packages import serving, wheel

UV = {f"uv-{UV_VERSION}.data/scripts/uv": f"#!/bin/sh\necho uv {UV_VERSION}\n"}


def pinned(path: Path, url: str = "", sha256: str | None = None) -> PinnedFile:
    return PinnedFile(name=path.name, sha256=sha256 or hashlib.sha256(path.read_bytes()).hexdigest(), url=url)


@pytest.fixture
def stand_in_uv(tmp_path) -> Path:
    (tmp_path / "wheels").mkdir()
    return wheel(tmp_path / "wheels", "uv", UV_VERSION, files=UV)


@pytest.fixture
def places(tmp_path) -> Places:
    return Places(layers=tmp_path / "layers", tools=tmp_path / "bin", cache=tmp_path / "cache")


def test_uv_comes_by_pip_from_the_index_that_pip_is_told_of(stand_in_uv, places, monkeypatch):
    monkeypatch.setattr(tools, "UV_WHEELS", {platform.machine(): pinned(stand_in_uv)})
    with serving(stand_in_uv.parent, login="me:s3cret") as index:
        url = index.url.replace("http://", "http://me:s3cret@")
        program = fetch_uv(places, {**os.environ, "PIP_INDEX_URL": url, "PIP_CONFIG_FILE": os.devnull})
    assert program == str(places.tools / f"uv-{UV_VERSION}")
    assert tools.find_uv(places, "") == program
    assert [path.name for path in places.tools.iterdir()] == [f"uv-{UV_VERSION}"]


@pytest.mark.parametrize(("sha256", "reason"), [(None, "No matching distribution"), ("0" * 64, "HASHES")])
def test_a_uv_that_pip_cannot_have_or_that_is_another_is_refused_without_the_password(
    stand_in_uv, places, monkeypatch, sha256, reason
):
    monkeypatch.setattr(tools, "UV_WHEELS", {platform.machine(): pinned(stand_in_uv, sha256=sha256)})
    if sha256 is None:
        stand_in_uv.rename(stand_in_uv.with_name("other-1.0-py3-none-any.whl"))
    with serving(stand_in_uv.parent) as index:
        url = index.url.replace("http://", "http://me:s3cret@")
        environ = {**os.environ, "PIP_INDEX_URL": url, "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
        with pytest.raises(Unreachable) as caught:
            fetch_uv(places, environ)
    assert str(caught.value).startswith(f"pip has no uv=={UV_VERSION}: ")
    assert reason in str(caught.value)
    assert "s3cret" not in str(caught.value)
    assert list(places.tools.iterdir()) == []


def test_a_file_from_an_address_is_written_whole_if_it_has_the_pinned_hash(stand_in_uv, tmp_path):
    with serving(stand_in_uv.parent) as index:
        url = index.url.replace("/simple", f"/files/{stand_in_uv.name}")
        fetch(pinned(stand_in_uv, url), tmp_path / "to" / "tool", mode=0o755)
        with pytest.raises(Unreachable, match="is not the file that is pinned"):
            fetch(pinned(stand_in_uv, url, "0" * 64), tmp_path / "else" / "tool")
        with pytest.raises(Unreachable, match="HTTP 404"):
            fetch(pinned(stand_in_uv, f"{url}x"), tmp_path / "else" / "tool")
    assert (tmp_path / "to" / "tool").read_bytes() == stand_in_uv.read_bytes()
    assert not (tmp_path / "else").exists()


def test_an_address_that_does_not_answer_is_named(stand_in_uv, tmp_path):
    with serving(stand_in_uv.parent) as index:
        pass
    with pytest.raises(Unreachable, match=r"/simple: .*refused"):
        fetch(pinned(stand_in_uv, index.url), tmp_path / "x")
