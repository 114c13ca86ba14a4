"""Fetching one pinned file, by name from an index of packages (PEP 503, PEP 691) or from its own address."""

from __future__ import annotations

import base64
import hashlib
import json
import netrc
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from html.parser import HTMLParser
from pathlib import Path

from gpucloud.domain.pinned import PinnedFile

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
