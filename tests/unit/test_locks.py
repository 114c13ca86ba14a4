"""The locks that travel with gpucloud: all that it needs, by version and hash, and no word of where from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gpucloud.adapters.packaging import _WITHOUT_WHEELS

ROOT = Path(__file__).resolve().parents[2]
RUNNER, DRIVER = ROOT / "templates/ci/requirements.lock", ROOT / "gpucloud/agent/drive/requirements.lock"
both = pytest.mark.parametrize("lock", [RUNNER, DRIVER], ids=["runner", "driver"])


def pins(lock: Path) -> Iterator[tuple[Requirement, tuple[str, ...]]]:
    """Yield each requirement with its hashes."""
    text = re.sub(r"(?m)^#.*\n", "", lock.read_text()).replace("\\\n", " ")
    for line in text.splitlines():
        words, *hashes = line.split("--hash=sha256:")
        yield Requirement(words.strip()), tuple(digest.strip() for digest in hashes)


def needed(*names: str) -> set[str]:
    """Return what these need, and what that needs, as it is installed here."""
    found, ahead = set[str](), [Requirement(name) for name in names]
    while ahead:
        wish = ahead.pop()
        if canonicalize_name(wish.name) in found:
            continue
        try:
            own = [Requirement(text) for text in requires(wish.name) or ()]
        except PackageNotFoundError:
            continue
        found.add(canonicalize_name(wish.name))
        extras = ("", *wish.extras)
        ahead += [r for r in own if r.marker is None or any(r.marker.evaluate({"extra": one}) for one in extras)]
    return found


@both
def test_a_lock_holds_versions_and_hashes_and_nothing_else(lock: Path) -> None:
    found = list(pins(lock))
    assert all(re.fullmatch(r"==[\w.]+", str(one.specifier)) and one.url is None for one, _ in found)
    assert all(hashes and all(re.fullmatch(r"[0-9a-f]{64}", one) for one in hashes) for _, hashes in found)
    text = re.sub(r"(?m)^#.*\n", "", lock.read_text())
    assert "://" not in text
    assert set(re.findall(r"(?<!\S)--?[a-z-]+", text)) == {"--hash"}


def test_all_that_gpucloud_needs_is_locked_in_a_version_that_it_may_have() -> None:
    declared = [text for text in requires("gpucloud") or () if "extra ==" not in text]
    locked = {canonicalize_name(one.name) for one, _ in pins(RUNNER)}
    assert needed(*declared) - locked == set(_WITHOUT_WHEELS)
    for wish in map(Requirement, declared):
        versions = [str(one.specifier).removeprefix("==") for one, _ in pins(RUNNER) if one.name == wish.name]
        assert wish.name in _WITHOUT_WHEELS or versions
        assert all(version in wish.specifier for version in versions)
    assert "torch" not in locked


def test_a_machine_that_drives_has_the_same_versions_of_what_it_needs() -> None:
    assert needed("boto3", "paramiko") <= {canonicalize_name(one.name) for one, _ in pins(DRIVER)}
    of_runner = {(one.name, str(one.specifier)): hashes for one, hashes in pins(RUNNER)}
    assert all(of_runner[one.name, str(one.specifier)] == hashes for one, hashes in pins(DRIVER))
