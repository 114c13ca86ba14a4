"""Fetching a pinned file from a real index on loopback."""

from __future__ import annotations

import hashlib

import pytest

from gpucloud.agent.layer import tools
from gpucloud.agent.layer.tools import Unreachable, fetch, fetch_from_index
from gpucloud.domain.node.pinned import PinnedFile
from tests.standins.packages import serving, wheel


@pytest.fixture
def tool(tmp_path):
    folder = tmp_path / "wheels"
    folder.mkdir()
    path = wheel(folder, "tool", "1.0")
    return path, PinnedFile(name=path.name, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.mark.parametrize("as_json", [False, True])
def test_a_file_is_found_by_name_on_both_kinds_of_page(tool, tmp_path, as_json):
    path, pinned = tool
    with serving(path.parent, as_json=as_json) as index:
        fetch_from_index(index.url, "tool", pinned, tmp_path / "to" / "tool.whl")
    assert (tmp_path / "to" / "tool.whl").read_bytes() == path.read_bytes()
    assert index.asked == ["/simple/tool/", f"/files/{path.name}"]
    assert [file.name for file in (tmp_path / "to").iterdir()] == ["tool.whl"]


def test_a_file_with_another_hash_is_refused_and_leaves_nothing(tool, tmp_path):
    path, _ = tool
    pinned = PinnedFile(name=path.name, sha256="0" * 64)
    with serving(path.parent) as index, pytest.raises(Unreachable, match="is not the file that is pinned"):
        fetch_from_index(index.url, "tool", pinned, tmp_path / "to" / "tool.whl")
    assert not (tmp_path / "to").exists()


def test_an_index_that_lacks_the_version_is_named(tool, tmp_path):
    path, _ = tool
    other = PinnedFile(name="tool-2.0-py3-none-any.whl", sha256="0" * 64)
    with serving(path.parent) as index, pytest.raises(Unreachable) as caught:
        fetch_from_index(index.url, "tool", other, tmp_path / "x")
    assert str(caught.value) == f"{index.url}/tool/ has no tool-2.0-py3-none-any.whl"


def test_a_password_in_the_address_is_used_for_page_and_file_and_never_shown(tool, tmp_path):
    path, pinned = tool
    with serving(path.parent, login="me:s3cret") as index:
        url = index.url.replace("http://", "http://me:s3cret@")
        fetch_from_index(url, "tool", pinned, tmp_path / "tool.whl")
        assert index.logins == ["me:s3cret", "me:s3cret"]
        with pytest.raises(Unreachable, match="401") as caught:
            fetch_from_index(url.replace("s3cret", "wr0ng"), "tool", pinned, tmp_path / "tool.whl")
    assert "wr0ng" not in str(caught.value)


def test_a_password_in_the_users_netrc_is_used(tool, tmp_path, monkeypatch):
    path, pinned = tool
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password n3trc\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with serving(path.parent, login="me:n3trc") as index:
        fetch_from_index(index.url, "tool", pinned, tmp_path / "tool.whl")
    assert (tmp_path / "tool.whl").is_file()


@pytest.mark.parametrize("index", ["https://me:s3cret@a.example/simple", "https://a.example/simple"])
def test_no_password_goes_out_in_the_clear_because_an_index_says_so(tool, tmp_path, monkeypatch, index):
    _, pinned = tool
    (tmp_path / "netrc").write_text("machine a.example login me password n3trc\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    asked = []

    def get(url, cert):
        asked.append(url)
        return f'<a href="http://a.example/files/{pinned.name}">it</a>'.encode(), "text/html", url

    monkeypatch.setattr(tools, "_get", get)
    with pytest.raises(Unreachable, match="without encryption") as caught:
        fetch_from_index(index, "tool", pinned, tmp_path / "tool.whl")
    assert asked == [f"{index}/tool/"]
    assert "s3cret" not in str(caught.value)


def test_only_the_web_is_asked(tool, tmp_path):
    path, pinned = tool
    with pytest.raises(Unreachable, match="is no http or https address"):
        fetch(path.as_uri(), pinned, tmp_path / "x")


def test_an_index_that_does_not_answer_is_named(tool, tmp_path):
    path, pinned = tool
    with serving(path.parent) as index:
        pass
    with pytest.raises(Unreachable, match=r"/simple/tool/: .*refused"):
        fetch_from_index(index.url, "tool", pinned, tmp_path / "x")
