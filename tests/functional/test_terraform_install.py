"""Terraform is fetched, checked, and only then installed."""

from __future__ import annotations

import functools
import hashlib
import http.server
import io
import json
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpucloud.adapters.terraform import find_terraform
from gpucloud.adapters.terraform.program import TERRAFORM, TERRAFORM_VERSION, install
from gpucloud.domain.errors import ToolMissing
from gpucloud.domain.node.layer import PinnedFile


class Server:
    """A download server over a folder; `put` offers an archive and says how it would be pinned."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / TERRAFORM_VERSION
        self.folder.mkdir()

    def put(self, content: bytes, *, digest: str | None = None) -> dict[str, PinnedFile]:
        (self.folder / "terraform.zip").write_bytes(content)
        (self.folder / "terraform_SHA256SUMS").write_text(f"{hashlib.sha256(content).hexdigest()}  terraform.zip\n")
        pinned = PinnedFile(name="terraform.zip", sha256=digest or hashlib.sha256(content).hexdigest())
        return dict.fromkeys(TERRAFORM, pinned)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Server, str]]:
    root = tmp_path / "server"
    root.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_args: object) -> None:
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(root)))
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield Server(root), f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    httpd.server_close()
    thread.join()


def archive(name: str = "terraform") -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as packed:
        packed.writestr(name, "#!/bin/sh\necho I am Terraform\n")
    return data.getvalue()


def quiet(line: str) -> None:
    """A story that nobody listens to."""


def test_what_was_checked_is_installed_and_found(server: tuple[Server, str], tmp_path: Path) -> None:
    files, url = server
    pinned = files.put(archive())
    told: list[str] = []
    program = install(tmp_path / "tools", story=told.append, server=url, pinned=pinned)
    assert program == tmp_path / "tools" / "terraform"
    assert program.stat().st_mode & 0o777 == 0o755
    assert pinned["linux_amd64"].sha256 in told[0]
    assert find_terraform({"PATH": str(tmp_path)}, tmp_path / "tools") == program


def test_another_archive_is_not_installed_whatever_the_server_says_of_it(
    server: tuple[Server, str], tmp_path: Path
) -> None:
    files, url = server
    pinned = files.put(archive(), digest="ab" * 32)
    with pytest.raises(ToolMissing, match="it was not installed"):
        install(tmp_path / "tools", story=quiet, server=url, pinned=pinned)
    assert not (tmp_path / "tools").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"no zip", "is not an archive"), (archive("else"), "is not an arch")],
    ids=["no archive", "another program"],
)
def test_what_holds_no_terraform_is_refused(
    server: tuple[Server, str], tmp_path: Path, content: bytes, message: str
) -> None:
    files, url = server
    pinned = files.put(content)
    with pytest.raises(ToolMissing, match=message):
        install(tmp_path / "tools", story=quiet, server=url, pinned=pinned)


def test_an_archive_that_the_server_lacks_is_an_error_with_a_hint(server: tuple[Server, str], tmp_path: Path) -> None:
    with pytest.raises(ToolMissing, match="cannot fetch") as caught:
        install(tmp_path / "tools", story=quiet, server=server[1])
    assert "https://developer.hashicorp.com/terraform/install" in (caught.value.hint or "")


def test_a_platform_whose_archive_is_not_pinned_gets_none(server: tuple[Server, str], tmp_path: Path) -> None:
    with pytest.raises(ToolMissing, match="no Terraform for"):
        install(tmp_path / "tools", story=quiet, server=server[1], pinned={})


def test_the_program_on_this_machine_is_the_one_of_the_pinned_archive() -> None:
    """The sources of its hash name the archive too; where another build is installed there is nothing to see."""
    found = find_terraform()
    said = subprocess.run([found, "version", "-json"], capture_output=True, text=True).stdout if found else "{}"
    about = json.loads(said)
    if (about.get("terraform_version"), about.get("platform")) != (TERRAFORM_VERSION, "linux_amd64"):
        pytest.skip(f"no Terraform {TERRAFORM_VERSION} for linux_amd64 here")
    assert found is not None
    digest = hashlib.sha256(found.read_bytes()).hexdigest()
    assert digest == "268000fca5c61021c6396893d9483007ba589ad9d0aaccbd7dfa8c78bf7dbe23"
