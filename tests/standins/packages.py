"""A real index of packages on loopback (PEP 503 and 691), and small real wheels for it."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Index:
    """Serves a folder of wheels; `asked` are the paths of the requests, `logins` the authorizations that came."""

    def __init__(self, folder: Path, *, as_json: bool = False, login: str | None = None) -> None:
        self.folder = folder
        self.as_json = as_json
        self.login = login
        self.asked: list[str] = []
        self.logins: list[str | None] = []
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                index.answer(self)

            do_HEAD = do_GET  # noqa: N815  uv asks so for the size of a wheel that it may read in part

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/simple"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        if request.command == "GET":
            self.asked.append(request.path)
        said = request.headers.get("Authorization")
        self.logins.append(base64.b64decode(said.split()[1]).decode() if said else None)
        if self.login is not None and self.logins[-1] != self.login:
            self.send(request, 401, b"who are you?", "text/plain")
            return
        parts = request.path.strip("/").split("/")
        if parts[0] == "simple" and len(parts) == 2:
            self.page(request, parts[1])
        elif parts[0] == "files" and (self.folder / parts[-1]).is_file():
            self.send(request, 200, (self.folder / parts[-1]).read_bytes(), "application/octet-stream")
        else:
            self.send(request, 404, b"no such thing", "text/plain")

    def page(self, request: BaseHTTPRequestHandler, project: str) -> None:
        wheels = sorted(self.folder.glob(f"{project.replace('-', '_')}-*.whl"))
        if not wheels:
            self.send(request, 404, b"no such project", "text/plain")
            return
        hashes = {wheel.name: hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels}
        if self.as_json:
            files = [{"filename": n, "url": f"../../files/{n}", "hashes": {"sha256": h}} for n, h in hashes.items()]
            body = json.dumps({"meta": {"api-version": "1.0"}, "name": project, "files": files}).encode()
            self.send(request, 200, body, "application/vnd.pypi.simple.v1+json")
        else:
            links = [f'<a href="../../files/{n}#sha256={h}">{n}</a><br/>' for n, h in hashes.items()]
            body = f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>".encode()
            self.send(request, 200, body, "text/html")

    def send(self, request: BaseHTTPRequestHandler, status: int, body: bytes, kind: str) -> None:
        request.send_response(status)
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(body)))
        if status == 200:
            request.send_header("Cache-Control", "max-age=600, public")  # as PyPI says
        if status == 401:
            request.send_header("WWW-Authenticate", 'Basic realm="packages"')
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(body)


@contextmanager
def serving(folder: Path, *, as_json: bool = False, login: str | None = None) -> Iterator[Index]:
    """Give an index of the folder's wheels for as long as the block lasts."""
    index = Index(folder, as_json=as_json, login=login)
    thread = threading.Thread(target=index.server.serve_forever)
    thread.start()
    try:
        yield index
    finally:
        index.server.shutdown()
        thread.join()
        index.server.server_close()


def wheel(folder: Path, name: str, version: str, *, files: dict[str, str] | None = None, needs: str = "") -> Path:
    """Write a wheel with one module that knows its version, and the other `files`."""
    info = f"{name}-{version}.dist-info"
    contents = {
        f"{name}/__init__.py": f"__version__ = {version!r}\n",
        **(files or {}),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in contents.items():
            archive.writestr(member, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{member},,\n" for member in [*contents, f"{info}/RECORD"]))
    return path
