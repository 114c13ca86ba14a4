"""Keys are made once, kept private, and verify what they signed and nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import stat
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from typer.testing import CliRunner

from gpucloud.adapters.keys import KeyRing
from gpucloud.cli.app import app
from gpucloud.domain.errors import CredentialsError, UsageError

ORDER = b'{"job": "digits"}'


def ring(folder, **environment):
    return KeyRing(folder, environment)


def text_of(key, how=PrivateFormat.OpenSSH, encryption=None):
    return key.private_bytes(Encoding.PEM, how, encryption or NoEncryption()).decode()


def test_the_own_key_is_made_once_for_its_owner_only(tmp_path):
    first, second = ring(tmp_path / "s").signer(), ring(tmp_path / "s").signer()

    assert first.line == second.line
    assert stat.S_IMODE((tmp_path / "s" / "key").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o700
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["key"]


def test_two_commands_at_once_get_the_same_first_key(tmp_path):
    lines, start = [], threading.Barrier(8)

    def ask():
        start.wait()
        lines.append(ring(tmp_path).signer().line)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(lines) == 8
    assert len(set(lines)) == 1


def test_a_key_is_named_by_the_whole_hash_of_its_public_half(tmp_path):
    own = ring(tmp_path).signer()
    digest = hashlib.sha256(base64.b64decode(own.line.split()[1])).digest()

    assert own.key_id == "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def test_ssh_keygen_reads_the_key_and_names_it_alike(tmp_path):
    own = ring(tmp_path).signer()

    said = subprocess.run(["ssh-keygen", "-l", "-f", str(tmp_path / "key")], capture_output=True, text=True, check=True)

    assert own.key_id in said.stdout


def test_what_the_own_key_signed_is_the_users_own_word(tmp_path):
    own = ring(tmp_path).signer()

    assert ring(tmp_path).trust().verify(ORDER, own.key_id, own.sign(ORDER)) == "own"


@pytest.mark.parametrize(
    "changed",
    [
        lambda data, key, signature: (data + b" ", key, signature),
        lambda data, key, signature: (data[:-1], key, signature),
        lambda data, key, signature: (data, key[:-1], signature),
        lambda data, key, signature: (data, "", signature),
        lambda data, key, signature: (data, key, signature[:-1]),
        lambda data, key, signature: (data, key, signature[:-1] + bytes([signature[-1] ^ 1])),
        lambda data, key, signature: (data, key, b""),
        lambda data, key, signature: (data, key, bytes(64)),
        lambda data, key, signature: (b"", key, signature),
    ],
)
def test_anything_else_is_nobodys_word(tmp_path, changed):
    own = ring(tmp_path).signer()

    assert ring(tmp_path).trust().verify(*changed(ORDER, own.key_id, own.sign(ORDER))) is None


def test_strangers_are_not_trusted_and_cannot_sign_for_others(tmp_path):
    mine, stranger = ring(tmp_path / "mine"), ring(tmp_path / "theirs").signer()
    own = mine.signer()

    assert mine.trust().verify(ORDER, stranger.key_id, stranger.sign(ORDER)) is None
    assert mine.trust().verify(ORDER, own.key_id, stranger.sign(ORDER)) is None


def test_asking_whom_to_trust_makes_no_key(tmp_path):
    ring(tmp_path / "s").trust()

    assert not (tmp_path / "s").exists()


def test_an_added_key_is_trusted_by_its_name_until_it_is_revoked(tmp_path):
    mine, anna = ring(tmp_path / "mine"), ring(tmp_path / "anna").signer()

    assert mine.add("anna", f"{anna.line} anna@laptop").key_id == anna.key_id
    assert mine.trust().verify(ORDER, anna.key_id, anna.sign(ORDER)) == "anna"
    assert stat.S_IMODE((tmp_path / "mine" / "trusted").stat().st_mode) == 0o600

    assert mine.revoke("anna").key_id == anna.key_id
    assert mine.trust().verify(ORDER, anna.key_id, anna.sign(ORDER)) is None


@pytest.mark.parametrize("word", ["key_id", "line"])
def test_a_key_may_be_revoked_by_itself(tmp_path, word):
    mine, anna = ring(tmp_path / "mine"), ring(tmp_path / "anna").signer()
    mine.add("anna", anna.line)

    mine.revoke(getattr(anna, word))

    assert mine.listed() == ()


def test_a_key_may_come_from_a_file(tmp_path):
    anna = ring(tmp_path / "anna").signer()
    (tmp_path / "anna.pub").write_text(f"{anna.line} anna@laptop\n")

    assert ring(tmp_path / "mine").add("anna", str(tmp_path / "anna.pub")).key_id == anna.key_id


def test_adding_a_key_again_changes_nothing(tmp_path):
    mine, anna = ring(tmp_path / "mine"), ring(tmp_path / "anna").signer()

    mine.add("anna", anna.line)
    mine.add("anna", anna.line)

    assert [key.name for key in mine.listed()] == ["anna"]


def test_one_name_is_one_key_and_one_key_one_name(tmp_path):
    mine, anna, ben = ring(tmp_path / "mine"), ring(tmp_path / "anna").signer(), ring(tmp_path / "ben").signer()
    mine.add("anna", anna.line)

    with pytest.raises(UsageError, match="another key"):
        mine.add("anna", ben.line)
    with pytest.raises(UsageError, match="as anna"):
        mine.add("ben", anna.line)


@pytest.mark.parametrize("name", ["", "own", "two words", "-x", "a/b", "x" * 65, "ü", "a\nssh-ed25519"])
def test_a_name_is_one_plain_word(tmp_path, name):
    with pytest.raises(UsageError, match="no name for a key"):
        ring(tmp_path / "mine").add(name, ring(tmp_path / "anna").signer().line)


@pytest.mark.parametrize(
    "text", ["", "AAAA", "ssh-ed25519", "ssh-ed25519 AAAAC3Nz", "/nowhere.pub", "ssh-ed25519 ü", "\0"]
)
def test_what_is_no_key_is_refused_in_one_line(tmp_path, text):
    with pytest.raises(UsageError) as caught:
        ring(tmp_path).add("anna", text)

    assert "gpucloud keys" in caught.value.hint
    assert "\n" not in caught.value.message


def test_keys_of_another_kind_are_refused(tmp_path):
    other = generate_private_key(SECP256R1()).public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)

    with pytest.raises(UsageError, match="Ed25519"):
        ring(tmp_path).add("anna", other.decode())


def test_a_private_key_given_by_mistake_is_refused_and_not_shown(tmp_path):
    text = text_of(Ed25519PrivateKey.generate())
    (tmp_path / "key").write_text(text)

    for given in (text, str(tmp_path / "key")):
        with pytest.raises(UsageError) as caught:
            ring(tmp_path / "mine").add("anna", given)
        assert text.split("\n")[2] not in caught.value.message + (caught.value.hint or "")


def test_a_key_is_revoked_wherever_it_counts_or_it_is_said_where_it_still_does(tmp_path):
    eve = ring(tmp_path / "eve").signer()
    mine = ring(tmp_path / "mine", GPUCLOUD_TRUSTED_KEYS=f"{eve.line} eve")
    mine.signer()
    (tmp_path / "mine" / "trusted").write_text(f"{eve.line} a\n{eve.line} b\n")

    with pytest.raises(UsageError, match="GPUCLOUD_TRUSTED_KEYS yet"):
        mine.revoke("a")
    assert [key.place for key in mine.listed()] == ["environment"]
    assert ring(tmp_path / "mine").trust().verify(ORDER, eve.key_id, eve.sign(ORDER)) is None


@pytest.mark.parametrize("word", ["own", "key_id", "line"])
def test_a_stolen_own_key_of_the_home_is_revoked_beside_one_of_the_environment(tmp_path, word):
    stolen = ring(tmp_path).signer()
    ci = ring(tmp_path, GPUCLOUD_SIGNING_KEY=text_of(Ed25519PrivateKey.generate()))

    if word == "own":
        with pytest.raises(UsageError, match="GPUCLOUD_SIGNING_KEY yet"):
            ci.revoke("own")
    else:
        ci.revoke(getattr(stolen, word))
    assert ci.trust().verify(ORDER, stolen.key_id, stolen.sign(ORDER)) is None


def test_the_own_key_is_nobody_elses_under_another_name(tmp_path):
    mine = ring(tmp_path)
    with pytest.raises(UsageError, match="this is your own key, which is trusted already") as refused:
        mine.add("me", mine.signer().line)
    assert refused.value.hint == "what `gpucloud keys` shows where me works is the line of me"


def test_two_that_change_the_list_at_once_lose_nothing(tmp_path):
    mine = ring(tmp_path / "mine")
    lines = [ring(tmp_path / str(n)).signer().line for n in range(6)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda n: mine.add(f"k{n}", lines[n]), range(6)))
        list(pool.map(lambda n: mine.revoke(f"k{n}"), range(0, 6, 2)))
    assert sorted(key.name for key in mine.listed()) == ["k1", "k3", "k5"]


@pytest.mark.parametrize("name", ["GPUCLOUD_TRUSTED_KEYS", "GPUCLOUD_SIGNING_KEY", "GPUCLOUD_SSH_KEY"])
def test_a_home_of_nobody_is_said_by_the_variables_name(tmp_path, name):
    with pytest.raises(UsageError, match=f"{name} is in ~nosuchuser"):
        ring(tmp_path, **{name: "~nosuchuser/x"}).trust()


def test_revoking_whom_nobody_trusts_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no trusted key"):
        ring(tmp_path).revoke("anna")


def test_revoking_the_own_key_makes_the_next_one_new(tmp_path):
    mine = ring(tmp_path)
    old = mine.signer()

    mine.revoke("own")

    assert mine.trust().verify(ORDER, old.key_id, old.sign(ORDER)) is None
    assert mine.signer().key_id != old.key_id


@pytest.mark.parametrize("how", [PrivateFormat.OpenSSH, PrivateFormat.PKCS8])
@pytest.mark.parametrize("as_file", [True, False])
def test_ci_gives_its_key_in_the_environment(tmp_path, how, as_file):
    key = Ed25519PrivateKey.generate()
    (tmp_path / "ci").write_text(text_of(key, how))
    given = str(tmp_path / "ci") if as_file else "\n" + text_of(key, how).replace("\n", "\r\n")

    ci = ring(tmp_path / "home", GPUCLOUD_SIGNING_KEY=given)

    assert ci.trust().verify(ORDER, ci.signer().key_id, key.sign(ORDER)) == "own"
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    "given",
    [
        "/nowhere",
        "-----BEGIN nothing",
        "\0",
        text_of(generate_private_key(SECP256R1())),
        text_of(Ed25519PrivateKey.generate(), PrivateFormat.PKCS8, BestAvailableEncryption(b"x")),
    ],
    ids=["no file", "no key", "no path", "another kind", "a passphrase"],
)
def test_a_signing_key_that_cannot_be_used_is_said_without_showing_it(tmp_path, given):
    with pytest.raises(CredentialsError) as caught:
        ring(tmp_path, GPUCLOUD_SIGNING_KEY=given).signer()

    assert caught.value.message == (
        "GPUCLOUD_SIGNING_KEY is neither an Ed25519 private key without a passphrase nor a file with one"
    )


def test_a_damaged_own_key_is_said_and_not_replaced(tmp_path):
    ring(tmp_path).signer()
    (tmp_path / "key").write_text("rubbish")

    with pytest.raises(CredentialsError, match="no Ed25519 key"):
        ring(tmp_path).signer()
    assert (tmp_path / "key").read_text() == "rubbish"


@pytest.mark.parametrize("as_file", [True, False])
def test_ci_lists_whom_it_trusts_in_the_environment(tmp_path, as_file):
    anna, ben = ring(tmp_path / "anna").signer(), ring(tmp_path / "ben").signer()
    text = f"# the team\n{anna.line} anna\n\n{ben.line}\n"
    (tmp_path / "list").write_text(text)

    ci = ring(tmp_path / "home", GPUCLOUD_TRUSTED_KEYS=str(tmp_path / "list") if as_file else text)

    assert [(key.name, key.place) for key in ci.listed()] == [("anna", "environment"), ("environment-4", "environment")]
    assert ci.trust().verify(ORDER, anna.key_id, anna.sign(ORDER)) == "anna"
    with pytest.raises(UsageError, match="GPUCLOUD_TRUSTED_KEYS"):
        ci.revoke("anna")


@pytest.mark.parametrize("text", ["ssh-ed25519", "ssh-ed25519 AAAA anna", "ssh-rsa AAAA ssh-ed25519", "/nowhere"])
def test_a_list_with_a_line_that_is_no_key_is_refused_whole(tmp_path, text):
    with pytest.raises(CredentialsError, match="GPUCLOUD_TRUSTED_KEYS"):
        ring(tmp_path, GPUCLOUD_TRUSTED_KEYS=text).trust()


@pytest.fixture
def command(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUCLOUD_HOME", str(tmp_path / "home"))
    for name in ("GPUCLOUD_SIGNING_KEY", "GPUCLOUD_TRUSTED_KEYS"):
        monkeypatch.delenv(name, raising=False)

    def run(*words):
        return CliRunner().invoke(app, ["keys", *words])

    return run


def test_keys_shows_the_line_to_hand_on_and_whom_it_trusts(command, tmp_path):
    anna = ring(tmp_path / "anna").signer()
    command("add", "anna", anna.line)

    shown, as_json = command(), json.loads(command("--json").stdout)

    own = KeyRing(tmp_path / "home" / "signing", os.environ).signer()
    assert shown.stdout.splitlines()[0] == own.line
    assert "anna" in shown.stdout
    assert as_json == {
        "version": 1,
        "own": {"key_id": own.key_id, "key": own.line},
        "trusted": [{"name": "anna", "key_id": anna.key_id, "key": anna.line, "from": "home"}],
    }


def test_what_keys_shows_can_be_added_elsewhere_as_it_stands(command, tmp_path):
    line = command().stdout.splitlines()[0]

    assert ring(tmp_path / "other").add("me", line).line == line


def test_keys_answers_as_json_when_it_adds_and_revokes(command, tmp_path):
    anna = ring(tmp_path / "anna").signer()

    added = json.loads(command("add", "anna", anna.line, "--json").stdout)
    revoked = json.loads(command("revoke", anna.key_id, "--json").stdout)

    assert added["added"] == revoked["revoked"]
    assert added["version"] == revoked["version"] == 1
    assert added["added"]["key_id"] == anna.key_id


def test_revoking_says_what_becomes_of_the_jobs_that_the_key_signed(command, tmp_path):
    command()
    own = command("revoke", "own").stderr
    assert "goes on after `gpucloud train JOB` alone, which signs it anew, or ends with `down`" in own
    anna = ring(tmp_path / "anna").signer()
    command("add", "anna", anna.line)
    assert "`gpucloud down JOB` ends it" in command("revoke", "anna").stderr
