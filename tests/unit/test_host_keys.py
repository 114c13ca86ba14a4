"""Which host keys of AWS machines are believed."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpucloud.adapters.aws.machine import HostKeys, from_console, parse
from gpucloud.adapters.home import Home
from gpucloud.domain.job.spec import AwsChoices, Resources
from gpucloud.store.directory import DirectoryStore
from gpucloud.wiring.aws import AwsCloud

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f"
OTHER = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIB8eHRwbGhkYFxYVFBMSERAPDg0MCwoJCAcGBQQDAgEA"
ID = "i-0123456789abcdef0"
HOSTS = "clusters/gpucloud-digits/hosts"


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path)


def console(*keys: str) -> str:
    lines = "\n".join(f"{key} root@ip-10-0-0-1" for key in keys)
    return (
        "[   12.1] cloud-init[900]: gpucloud: the host key is not published\r\n"
        "<14>Nov 21 10:00:00 ec2: -----BEGIN SSH HOST KEY FINGERPRINTS-----\r\n"
        "<14>Nov 21 10:00:00 ec2: 256 SHA256:abc root@ip-10-0-0-1 (ED25519)\r\n"
        "<14>Nov 21 10:00:00 ec2: -----END SSH HOST KEY FINGERPRINTS-----\r\n"
        f"-----BEGIN SSH HOST KEY KEYS-----\n{lines}\n-----END SSH HOST KEY KEYS-----\n"
    )


@pytest.mark.parametrize("text", [KEY, f"{KEY}\n", f"{KEY} root@ip-10-0-0-1\n"])
def test_one_line_with_an_ed25519_key_is_a_key(text: str) -> None:
    assert parse(text.encode()) == KEY


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "ssh-ed25519",
        f"{KEY}\n{OTHER}\n",
        f"{KEY}\n\n",
        f"{KEY}\r\n",
        f" {KEY}",
        f"{KEY}\tcomment",
        f"{KEY} a b",
        f'command="x" {KEY}',
        KEY.replace("ssh-ed25519 ", "ssh-rsa "),
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAB",
        "ssh-ed25519 !!!!",
        "ssh-ed25519 " + "QUJD" * 17,
        KEY[:-1] + "é",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    assert parse(text.encode()) is None


def test_a_published_key_is_found_by_the_instance_s_id(store: DirectoryStore) -> None:
    store.put(f"{HOSTS}/AROAOURS:{ID}", f"{KEY}\n".encode())
    store.put(f"{HOSTS}/AROAOURS:i-0fffffffffffffff0", f"{OTHER}\n".encode())
    assert HostKeys(store, "gpucloud-digits").of(ID) == KEY
    assert HostKeys(store, "gpucloud-digits", role_id="AROAOURS").of(ID) == KEY
    assert HostKeys(store, "gpucloud-digit").of(ID) is None


def test_a_key_that_another_role_published_is_refused(store: DirectoryStore) -> None:
    store.put(f"{HOSTS}/AROAOTHER:{ID}", f"{OTHER}\n".encode())
    keys = HostKeys(store, "gpucloud-digits", role_id="AROAOURS")
    assert keys.of(ID) is None
    store.put(f"{HOSTS}/AROAOURS:{ID}", f"{KEY}\n".encode())
    assert keys.of(ID) == KEY


def test_two_roles_that_speak_for_one_machine_are_both_refused(store: DirectoryStore) -> None:
    store.put(f"{HOSTS}/AROAOURS:{ID}", f"{KEY}\n".encode())
    store.put(f"{HOSTS}/AROAOTHER:{ID}", f"{OTHER}\n".encode())
    assert HostKeys(store, "gpucloud-digits").of(ID) is None


def test_a_machine_that_published_nothing_is_known_by_its_console(store: DirectoryStore) -> None:
    asked = []

    def shown(instance_id: str) -> str | None:
        asked.append(instance_id)
        return None if len(asked) == 1 else console("ecdsa-sha2-nistp256 AAAAE2VjZHNh", KEY)

    times = iter([0.0, 29.9, 30.0, 39.9, 40.0])
    keys = HostKeys(store, "gpucloud-digits", role_id="AROAOURS", console=shown, monotonic=lambda: next(times))
    assert [keys.of(ID), keys.of(ID)] == [None, None]
    assert asked == []
    assert [keys.of(ID), keys.of(ID)] == [None, None]
    assert asked == [ID]
    assert [keys.of(ID), keys.of(ID)] == [KEY, KEY]
    assert asked == [ID, ID]


class Counted(DirectoryStore):
    """Says how often it was listed."""

    listed = 0

    def list(self, prefix: str) -> tuple[str, ...]:
        self.listed += 1
        return super().list(prefix)


def test_many_machines_cost_one_listing_and_a_later_look_another(tmp_path: Path) -> None:
    store, now = Counted(tmp_path), [0.0]
    ids = [f"i-{number:x}" for number in range(64)]
    keys = HostKeys(store, "gpucloud-digits", monotonic=lambda: now[0])
    assert {keys.of(one) for one in ids} == {None}
    for one in ids:
        store.put(f"{HOSTS}/AROAOURS:{one}", f"{KEY}\n".encode())
    now[0] = 3.0
    assert {keys.of(one) for one in ids} == {KEY}
    assert store.listed == 2


def test_no_more_than_eight_consoles_are_asked_in_a_second(store: DirectoryStore) -> None:
    asked: list[str] = []
    now = [0.0]
    keys = HostKeys(store, "gpucloud-digits", console=asked.append, console_after_s=0, monotonic=lambda: now[0])
    for _ in range(2):
        assert {keys.of(f"i-{number:x}") for number in range(64)} == {None}
    assert asked == [f"i-{number:x}" for number in range(8)]
    now[0] = 1.0
    assert {keys.of(f"i-{number:x}") for number in range(64)} == {None}
    assert asked == [f"i-{number:x}" for number in range(16)]


def test_a_key_that_was_found_stays_whatever_is_published_later(store: DirectoryStore) -> None:
    store.put(f"{HOSTS}/AROAOURS:{ID}", f"{KEY}\n".encode())
    keys = HostKeys(store, "gpucloud-digits", role_id="AROAOURS")
    assert keys.of(ID) == KEY
    store.put(f"{HOSTS}/AROAOURS:{ID}", f"{OTHER}\n".encode())
    assert keys.of(ID) == KEY


@pytest.mark.parametrize(
    "text",
    [
        "",
        console(),
        console(KEY).split("-----END SSH HOST KEY KEYS")[0],
        console(KEY) + console(OTHER),
        f"{KEY} root@ip-10-0-0-1\n",
    ],
)
def test_a_console_without_one_whole_answer_gives_no_key(text: str) -> None:
    assert from_console(text) is None


def test_a_console_that_says_the_same_twice_gives_the_key() -> None:
    assert from_console(console(KEY) + console(KEY)) == KEY


def test_a_console_is_asked_for_as_it_is_now(tmp_path: Path):
    """AWS else gives what it kept at the last change of state, often minutes later."""
    asked: list[dict[str, object]] = []

    def read(**params: object) -> dict[str, str]:
        asked.append(params)
        return {"Output": "ssh-ed25519 AAAA"}

    cloud = AwsCloud(Home(tmp_path), AwsChoices(), Resources())
    cloud.__dict__["aws"] = SimpleNamespace(calling=lambda *_: nullcontext(SimpleNamespace(get_console_output=read)))
    assert cloud._console("us-east-1", "i-1") == "ssh-ed25519 AAAA"
    assert asked == [{"InstanceId": "i-1", "Latest": True}]
