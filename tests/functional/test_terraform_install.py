"""Terraform is fetched, checked, and only then installed."""

from __future__ import annotations

import functools
import hashlib
import http.server
import io
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpucloud.adapters.terraform import find_terraform
from gpucloud.adapters.terraform.install import _platform, install
from gpucloud.domain.errors import ToolMissing


class Server:
    """A download server over a folder; `put` offers an archive with its list of checksums."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "9.9.9"
        self.folder.mkdir()

    def put(self, content: bytes, *, digest: str | None = None) -> str:
        name = f"terraform_9.9.9_{_platform()}.zip"
        (self.folder / name).write_bytes(content)
        right = hashlib.sha256(content).hexdigest()
        (self.folder / "terraform_9.9.9_SHA256SUMS").write_text(f"{'0' * 64}  other.zip\n{digest or right}  {name}\n")
        return right


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
    digest = files.put(archive())
    told: list[str] = []
    program = install(tmp_path / "tools", story=told.append, server=url, version="9.9.9")
    assert program == tmp_path / "tools" / "terraform"
    assert program.stat().st_mode & 0o777 == 0o755
    assert digest in told[0]
    assert find_terraform({"PATH": str(tmp_path)}, tmp_path / "tools") == program


def test_a_wrong_checksum_installs_nothing(server: tuple[Server, str], tmp_path: Path) -> None:
    files, url = server
    files.put(archive(), digest="ab" * 32)
    with pytest.raises(ToolMissing, match="it was not installed"):
        install(tmp_path / "tools", story=quiet, server=url, version="9.9.9")
    assert not (tmp_path / "tools").exists()


@pytest.mark.parametrize(
    ("content", "message"), [(b"no zip", "is not an archive"), (archive("else"), "is not an arch")]
)
def test_what_holds_no_terraform_is_refused(
    server: tuple[Server, str], tmp_path: Path, content: bytes, message: str
) -> None:
    files, url = server
    files.put(content)
    with pytest.raises(ToolMissing, match=message):
        install(tmp_path / "tools", story=quiet, server=url, version="9.9.9")


def test_a_version_that_the_server_lacks_is_an_error_with_a_hint(server: tuple[Server, str], tmp_path: Path) -> None:
    with pytest.raises(ToolMissing, match="cannot fetch") as caught:
        install(tmp_path / "tools", story=quiet, server=server[1], version="9.9.8")
    assert "https://developer.hashicorp.com/terraform/install" in (caught.value.hint or "")
