"""The programs that make layers: found on the node, else fetched once, pinned, into the shared tools folder."""

from __future__ import annotations

import base64
import hashlib
import json
import netrc
import os
import platform
import re
import shutil
import ssl
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterable, Mapping
from html.parser import HTMLParser
from pathlib import Path

from gpucloud.agent.layer.environment import Places
from gpucloud.agent.layer.pipshim import settings
from gpucloud.domain.node.pinned import (
    MICROMAMBA,
    MICROMAMBA_FOLDER,
    MICROMAMBA_VERSION,
    PIP_WHEEL,
    UV_VERSION,
    UV_WHEELS,
    PinnedFile,
)

_OLDEST_UV = (0, 5)  # `--default-index` and its variables (uv's environment reference)
_CONDAS = ("micromamba", "mamba", "conda")
_CONDA_HOMES = ("miniforge3", "mambaforge", "miniconda3", "anaconda3")


def find_uv(places: Places, path: str) -> str | None:
    """Return uv's path if the node has one that works and is new enough: on `path`, else in the tools folder."""
    for found in (shutil.which("uv", path=path), places.tools / "uv", _own_uv(places)):
        if found is not None and (uv_version(str(found)) or (0,)) >= _OLDEST_UV:
            return str(found)
    return None


def uv_version(program: str) -> tuple[int, ...] | None:
    """Return the version that the program says; None where it does not run (another platform, a damaged disk)."""
    m = re.match(r"uv (\d+)\.(\d+)\.(\d+)", _first_line([program, "--version"]))
    return tuple(int(part) for part in m.groups()) if m else None


def fetch_uv(places: Places, environ: Mapping[str, str]) -> str:
    """Return the path of the pinned uv, fetched from the index that pip would use. Raises Unreachable."""
    wheel = UV_WHEELS.get(platform.machine()) if sys.platform == "linux" else None
    if wheel is None:
        raise Unreachable(f"no uv is pinned for {sys.platform} on {platform.machine()}")
    program = _own_uv(places)
    archive = _wheel("uv", wheel, places, environ)
    try:
        _extract(archive, f"uv-{UV_VERSION}.data/scripts/uv", program)
    finally:
        archive.unlink(missing_ok=True)
    if uv_version(str(program)) is None:
        raise Unreachable(f"uv {UV_VERSION} does not run here")
    return str(program)


def fetch_pip(places: Places, environ: Mapping[str, str]) -> Path:
    """Return the path of pip's pinned wheel, fetched from the index that pip would use. Raises Unreachable."""
    kept = places.tools / PIP_WHEEL.name
    return kept if kept.is_file() else _wheel("pip", PIP_WHEEL, places, environ)


def conda_program(places: Places, path: str) -> str:
    """Return a micromamba, mamba or conda: the node's, else micromamba, pinned and fetched. Raises Unreachable."""
    for found in _condas(places, path):
        if found is not None and _first_line([str(found), "--version"]):
            return str(found)
    file = MICROMAMBA.get(platform.machine()) if sys.platform == "linux" else None
    if file is None:
        raise Unreachable(f"no micromamba is pinned for {sys.platform} on {platform.machine()}")
    program = _own_micromamba(places)
    fetch(f"{MICROMAMBA_FOLDER}/{file.name}", file, program)
    program.chmod(0o755)
    return str(program)


def _condas(places: Places, path: str) -> Iterable[str | Path | None]:
    yield os.environ.get("MAMBA_EXE")
    yield from (shutil.which(name, path=path) for name in _CONDAS)
    yield os.environ.get("CONDA_EXE")
    for home in (*(Path.home() / name for name in _CONDA_HOMES), Path("/opt/conda"), Path("/opt/miniforge3")):
        yield shutil.which("conda", path=str(home / "bin"))
    yield _own_micromamba(places)


def _own_uv(places: Places) -> Path:
    return places.tools / f"uv-{UV_VERSION}"


def _own_micromamba(places: Places) -> Path:
    return places.tools / f"micromamba-{MICROMAMBA_VERSION}"


def _wheel(project: str, wheel: PinnedFile, places: Places, environ: Mapping[str, str]) -> Path:
    """Fetch from where pip would: its settings decide, and without an index there is nowhere to fetch from."""
    found = settings(environ)
    if found.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        raise Unreachable("pip is told to use no index")
    target = places.tools / wheel.name
    index = found.get("index-url", PYPI).split()[0]
    fetch_from_index(index, project, wheel, target, cert=found.get("cert"))
    return target


def _extract(archive: Path, member: str, program: Path) -> None:
    beside = program.with_name(f".{program.name}.{os.getpid()}")
    with zipfile.ZipFile(archive) as wheel, wheel.open(member) as source, beside.open("wb") as target:
        shutil.copyfileobj(source, target)
    beside.chmod(0o755)
    beside.replace(program)


def _first_line(argv: list[str]) -> str:
    """Return the first line of what the program says; empty where it does not run."""
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.partition("\n")[0] if done.returncode == 0 else ""


# Fetching one pinned file, by name from an index of packages (PEP 503, PEP 691) or from its own address.


PYPI = "https://pypi.org/simple"
_TYPES = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_TIMEOUT_S = 20.0
_MOST_BYTES = 200 << 20


class Unreachable(Exception):
    """The file could not be had; the message says from where and why, without credentials."""


def fetch_from_index(index: str, project: str, pinned: PinnedFile, target: Path, *, cert: str | None = None) -> None:
    """Write the project's file of that name to `target`, whole or not at all. Raises Unreachable."""
    page = f"{index.rstrip('/')}/{project}/"
    data, kind, base = _get(page, cert)
    links = _json_links(data) if "json" in kind else _html_links(data)
    url = links.get(pinned.name)
    if url is None:
        raise Unreachable(f"{_shown(page)} has no {pinned.name}")
    file = urllib.parse.urljoin(base, url)
    schemes = urllib.parse.urlsplit(page).scheme, urllib.parse.urlsplit(file).scheme
    if schemes == ("https", "http"):  # as pip: passwords for that host would go with it
        raise Unreachable(f"{_shown(page)} would have {pinned.name} fetched without encryption")
    fetch(_with_login(file, page), pinned, target, cert=cert)


def fetch(url: str, pinned: PinnedFile, target: Path, *, cert: str | None = None) -> None:
    """Write what is at the address to `target` if it has the pinned hash. Raises Unreachable."""
    data, _, _ = _get(url, cert)
    if hashlib.sha256(data).hexdigest() != pinned.sha256:
        raise Unreachable(f"{_shown(url)} is not the file that is pinned (SHA-256 {pinned.sha256[:12]}…)")
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    beside.write_bytes(data)
    beside.replace(target)


def _get(url: str, cert: str | None) -> tuple[bytes, str, str]:
    """Return the body, its type and the address that it came from in the end."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise Unreachable(f"{_shown(url)} is no http or https address")
    request = urllib.request.Request(_bare(url), headers={"Accept": _TYPES, "User-Agent": "gpucloud"})  # noqa: S310
    login = _login(url)
    if login is not None:  # unredirected: another host must not be told
        request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(login.encode()).decode()}")
    context = ssl.create_default_context(cafile=cert) if parts.scheme == "https" else None
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=context) as answer:  # noqa: S310
            data = answer.read(_MOST_BYTES)
            return data, answer.headers.get_content_type(), answer.geturl()
    except urllib.error.HTTPError as error:
        with error:
            raise Unreachable(f"{_shown(url)}: HTTP {error.code} {error.reason}") from error
    except (OSError, ValueError) as error:  # URLError, timeouts and TLS errors are OSErrors
        reason = getattr(error, "reason", None) or error
        raise Unreachable(f"{_shown(url)}: {reason}") from error


def _login(url: str) -> str | None:
    """Return `user:password` from the address itself, else from the user's netrc."""
    parts = urllib.parse.urlsplit(url)
    if parts.username is not None:
        return f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
    try:
        found = netrc.netrc(os.environ.get("NETRC")).authenticators(parts.hostname or "")
    except (OSError, netrc.NetrcParseError):
        return None
    return f"{found[0]}:{found[2] or ''}" if found else None


def _with_login(url: str, page: str) -> str:
    """A file on the index's own host is fetched as the page was."""
    file, index = urllib.parse.urlsplit(url), urllib.parse.urlsplit(page)
    if file.hostname != index.hostname or index.username is None or file.username is not None:
        return url
    return urllib.parse.urlunsplit(file._replace(netloc=index.netloc.rpartition("@")[0] + "@" + file.netloc))


def _bare(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment=""))


_shown = _bare


def _json_links(data: bytes) -> dict[str, str]:
    try:
        return {file["filename"]: file["url"] for file in json.loads(data)["files"]}
    except (ValueError, KeyError, TypeError):
        return {}


def _html_links(data: bytes) -> dict[str, str]:
    parser = _Anchors()
    parser.feed(data.decode("utf-8", errors="replace"))
    return parser.links


class _Anchors(HTMLParser):
    """The files that a page of PEP 503 links to, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.links: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep the address of an anchor under its last path segment."""
        href = dict(attrs).get("href") if tag == "a" else None
        if href:
            name = urllib.parse.unquote(urllib.parse.urlsplit(href).path.rpartition("/")[2])
            self.links[name] = href
