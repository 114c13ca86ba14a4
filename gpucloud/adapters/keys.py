"""Keys of a user: who signs what is wanted of jobs, and whose signatures count; and the SSH keys of clusters.

All are Ed25519, in OpenSSH's formats. A person's key is named by its fingerprint, as `ssh-keygen -l` writes it: the
whole SHA-256 of the public key, so that no other key can bear the name. Private keys and the list of trusted ones lie
in the user's own folder, or come from the environment of a CI job; they are never in a store, which machines can write
to.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)

from gpucloud.domain.errors import CredentialsError, StoreError, UsageError
from gpucloud.domain.state.order import OWN
from gpucloud.domain.variables import GPUCLOUD_SIGNING_KEY, GPUCLOUD_SSH_KEY, GPUCLOUD_TRUSTED_KEYS
from gpucloud.store.directory import user_path
from gpucloud.system.processes import locked
from gpucloud.system.wholefile import write_whole

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}")
_KIND = "ssh-ed25519"
_VARIABLES = {"environment": GPUCLOUD_TRUSTED_KEYS}
_HOW_TO_SHOW = "the line that `gpucloud keys` shows there: 'ssh-ed25519 AAAA…'"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustedKey:
    """A public key whose signatures count here; `place` says which list it is on: home or environment."""

    name: str
    line: str
    place: str = "home"

    @property
    def key_id(self) -> str:
        """Its fingerprint."""
        return _fingerprint(self.line)


class SigningKey:
    """The user's own key."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.line = private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode("ascii")
        self.key_id = _fingerprint(self.line)

    def sign(self, data: bytes) -> bytes:
        """Return the signature of these very bytes."""
        return self._private.sign(data)


class TrustedKeys:
    """The keys whose signatures count."""

    def __init__(self, keys: tuple[TrustedKey, ...]) -> None:
        self._keys = {key.key_id: key for key in keys}

    def verify(self, data: bytes, key_id: str, signature: bytes) -> str | None:
        """Return whose key signed these very bytes; None where it is not trusted, or the signature is not its."""
        key = self._keys.get(key_id)
        if key is None:
            return None
        try:
            _public(key.line).verify(signature, data)
        except InvalidSignature:
            return None
        return key.name

    def name_of(self, key_id: str) -> str | None:
        """Return whose key has that fingerprint, None for none that is trusted: anybody can name one."""
        key = self._keys.get(key_id)
        return key.name if key is not None else None


class KeyRing:
    """The user's own key and the trusted ones, in the user's folder; the environment of CI comes before it."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._environment = environment

    def signer(self) -> SigningKey:
        """Return the own key, made if there is none. Raises CredentialsError for one that cannot be used.

        It is GPUCLOUD_SIGNING_KEY's, or made from the one that GPUCLOUD_SSH_KEY names: a runner needs one alone.
        """
        return self._given() or self._kept_own()

    def _given(self) -> SigningKey | None:
        if given := self._environment.get(GPUCLOUD_SIGNING_KEY):
            return _given_key(given)
        if named := self._environment.get(GPUCLOUD_SSH_KEY):
            return SigningKey(derived_key(user_path(named, GPUCLOUD_SSH_KEY), "gpucloud signing"))
        return None

    def _kept_own(self) -> SigningKey:
        try:
            generate_key(self._key)
            return SigningKey(_private(self._key.read_bytes()))
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise CredentialsError(
                f"{self._key} is no Ed25519 key without a passphrase",
                hint=f"rm {self._key}: the next command makes a new one",
            ) from error
        except OSError as error:
            raise StoreError(
                f"cannot write {self._key}: {error.strerror}", hint="GPUCLOUD_HOME names the folder"
            ) from error

    def trust(self) -> TrustedKeys:
        """Return what verifies: the own keys that there are already, and those on the lists."""
        return TrustedKeys(self._counting()[::-1])

    def listed(self) -> tuple[TrustedKey, ...]:
        """Return the trusted keys of others: the folder's list, then the environment's. Raises CredentialsError."""
        given = self._environment.get(GPUCLOUD_TRUSTED_KEYS, "")
        if given and _KIND not in given:
            try:
                given = user_path(given, GPUCLOUD_TRUSTED_KEYS).read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise CredentialsError(
                    "GPUCLOUD_TRUSTED_KEYS is neither a list of keys nor a file with one",
                    hint="one key a line: ssh-ed25519 AAAA… NAME",
                ) from error
        return (*self._kept(), *_parsed(given, "environment", GPUCLOUD_TRUSTED_KEYS))

    def add(self, name: str, text: str) -> TrustedKey:
        """Trust a key, as the line of its owner or a file with it; adding it again changes nothing. UsageError."""
        if not _NAME.fullmatch(name) or name == OWN:
            raise UsageError(f"{name!r} is no name for a key", hint="letters, digits and . _ @ + -, such as ci or anna")
        key = TrustedKey(name=name, line=_line(text))
        with self._changing():
            kept = self._kept()
            for one in self._counting():
                if one == key:
                    return key
                if one.name == name and one in kept:
                    raise UsageError(f"{name} has another key", hint=f"gpucloud keys revoke {name} first")
                if one.line == key.line:
                    if one.name == OWN:
                        hint = f"what `gpucloud keys` shows where {name} works is the line of {name}"
                        raise UsageError("this is your own key, which is trusted already", hint=hint)
                    hint = f"gpucloud keys revoke {one.name}, to call it {name} from then on"
                    raise UsageError(f"this key is trusted already, as {one.name}", hint=hint)
            self._write((*kept, key))
        return key

    def revoke(self, which: str) -> TrustedKey:
        """Trust a key no longer, by name, fingerprint or line; the own one is replaced by a new one. UsageError.

        It goes from wherever it counts: under other names too, and where a variable names it, that is said.
        """
        with self._changing():
            known = [key for key in self._counting() if which in _words(key)]
            if not known:
                raise UsageError(f"no trusted key is called {which!r}", hint="gpucloud keys lists them")
            gone = {key.line for key in known}
            if kept := self._kept():
                self._write(tuple(one for one in kept if one.line not in gone))
            if self._key.exists() and self._kept_own().line in gone:
                self._key.unlink(missing_ok=True)
        if (left := next((key for key in self._counting() if key.line in gone), None)) is not None:
            place = _VARIABLES.get(left.place, left.place)
            raise UsageError(f"{which} is trusted by {place} yet, and nowhere else now", hint="change that variable")
        return known[0]

    @property
    def _key(self) -> Path:
        return self._folder / "key"

    @property
    def _list(self) -> Path:
        return self._folder / "trusted"

    def _counting(self) -> tuple[TrustedKey, ...]:
        """Return every key whose signatures count, the own ones first, each from wherever it is."""
        given, found = self._given(), []
        if given is not None:
            name = GPUCLOUD_SIGNING_KEY if self._environment.get(GPUCLOUD_SIGNING_KEY) else GPUCLOUD_SSH_KEY
            found.append(TrustedKey(name=OWN, line=given.line, place=name))
        if self._key.exists():
            found.append(TrustedKey(name=OWN, line=self._kept_own().line))
        return (*found, *self.listed())

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Have the list to oneself: of two that change it at once, neither brings back what the other took out."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with locked(self._folder / "lock"):
                yield
        except OSError as error:
            raise StoreError(
                f"cannot write {self._folder}: {error.strerror}", hint="GPUCLOUD_HOME names the folder"
            ) from error

    def _kept(self) -> tuple[TrustedKey, ...]:
        try:
            text = self._list.read_text(encoding="utf-8")
        except FileNotFoundError:
            return ()
        except (OSError, ValueError) as error:
            raise StoreError(f"{self._list} cannot be read", hint=f"look at it, or rm {self._list}") from error
        return _parsed(text, "home", str(self._list))

    def _write(self, keys: tuple[TrustedKey, ...]) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_whole(self._list, "".join(f"{key.line} {key.name}\n" for key in keys), lasting=True)
        except OSError as error:
            raise StoreError(
                f"cannot write {self._list}: {error.strerror}", hint="GPUCLOUD_HOME names the folder"
            ) from error


def _words(key: TrustedKey) -> frozenset[str]:
    """Return what the key may be called."""
    return frozenset({key.name, key.key_id, key.line, key.line.partition(" ")[2]})


def _given_key(given: str) -> SigningKey:
    """Return the key of the environment: its text, or the file it names."""
    try:
        data = given.encode() if "-----BEGIN" in given else user_path(given, GPUCLOUD_SIGNING_KEY).read_bytes()
        return SigningKey(_private(data.strip() + b"\n"))
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise CredentialsError(
            "GPUCLOUD_SIGNING_KEY is neither an Ed25519 private key without a passphrase nor a file with one",
            hint="ssh-keygen -q -t ed25519 -N '' -f key makes one",
        ) from error


def _private(data: bytes) -> Ed25519PrivateKey:
    load = load_ssh_private_key if b"BEGIN OPENSSH" in data else load_pem_private_key
    key = load(data, password=None)
    if not isinstance(key, Ed25519PrivateKey):
        raise TypeError(f"{type(key).__name__}, not Ed25519")
    return key


def _public(line: str) -> Ed25519PublicKey:
    key = load_ssh_public_key(line.encode("ascii"))
    if not isinstance(key, Ed25519PublicKey):
        raise TypeError(f"{type(key).__name__}, not Ed25519")
    return key


def _fingerprint(line: str) -> str:
    digest = hashlib.sha256(base64.b64decode(line.split(" ")[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode("ascii").rstrip("=")


def _line(text: str) -> str:
    """Return the public key of a line with it, or of a file with that line, without its comment. UsageError."""
    if "PRIVATE KEY" in text:
        raise UsageError("that is a private key, which nobody but its owner may have", hint=_HOW_TO_SHOW)
    if not any(word.startswith("AAAA") for word in text.split()):
        try:
            text = user_path(text, "the key").read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UsageError(f"{text[:80]!r} is neither a public key nor a file with one", hint=_HOW_TO_SHOW) from error
    try:
        return _normal(text)
    except (ValueError, TypeError, IndexError, UnsupportedAlgorithm, binascii.Error) as error:
        raise UsageError("that is no Ed25519 public key", hint=_HOW_TO_SHOW) from error


def _normal(text: str) -> str:
    words = text.split()
    line = f"{_KIND} {next(word for word in [*words, ''] if word.startswith('AAAA') or not word)}"
    key = _public(line)
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode("ascii")


def _parsed(text: str, place: str, source: str) -> tuple[TrustedKey, ...]:
    """Return a list's keys; a line that is none has the whole list refused, so that nobody is left out unnoticed."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        words = line.split()
        try:
            name = words[2] if len(words) > 2 and words[2] != OWN else f"{place}-{number}"
            if not _NAME.fullmatch(name) or words[0] != _KIND:
                raise ValueError(line)  # noqa: TRY301  (told below, as the others are)
            found.append(TrustedKey(name=name, line=_normal(line), place=place))
        except (ValueError, TypeError, IndexError, UnsupportedAlgorithm) as error:
            raise CredentialsError(
                f"{source}:{number}: this is no trusted key", hint="one key a line: ssh-ed25519 AAAA… NAME"
            ) from error
    return tuple(found)


# Key pairs in files: made once, kept private. Machines are opened by one of their cluster's own.


_MAKES = "ssh-keygen -q -t ed25519 -N '' -f FILE makes one"


def generate_key(path: Path) -> str:
    """Return the public line (`ssh-ed25519 AAAA…`) of the private key at `path`, made if there is none.

    The file is Ed25519 in OpenSSH's format, mode 0600. Of two callers at once, both get the same key.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write_once(path, Ed25519PrivateKey.generate())
    private = load_ssh_private_key(path.read_bytes(), password=None)
    return private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode("ascii")


def derive_key(source: Path, cluster: str, target: Path) -> None:
    """Write to `target` the key that the private key at `source` gives to that cluster.

    It is the same one wherever `source` is, opens no other cluster, and says nothing of `source` (HKDF, RFC 5869):
    machines may have it. Raises CredentialsError for a key that is not there, or has a passphrase.
    """
    key = derived_key(source, f"gpucloud cluster {cluster}")
    if _has(target, key):  # on a full disk it could not be written again
        return
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _beside(target, key) as whole:
        whole.replace(target)


def _has(path: Path, key: Ed25519PrivateKey) -> bool:
    """Whether the file has that key, for its owner only."""
    try:
        there, is_open = load_ssh_private_key(path.read_bytes(), password=None), path.stat().st_mode & 0o077
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm):
        return False
    is_that = isinstance(there, Ed25519PrivateKey) and there.private_bytes_raw() == key.private_bytes_raw()
    return is_that and not is_open


def derived_key(source: Path, purpose: str) -> Ed25519PrivateKey:
    """Return the key that the private key at `source` gives for a purpose. Raises CredentialsError.

    One that is not there is not made: it would open no machine, and would then pass for the one that does.
    """
    try:
        secret = _secret_of(source.read_bytes())
    except FileNotFoundError as error:
        raise CredentialsError(
            f"GPUCLOUD_SSH_KEY: there is no file {source}",
            hint="the same key wherever a job is supervised from; " + _MAKES,
        ) from error
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise CredentialsError(
            f"GPUCLOUD_SSH_KEY: {source} is no private key without a passphrase",
            hint=_MAKES,
        ) from error
    seed = HKDF(algorithm=SHA256(), length=32, salt=None, info=purpose.encode()).derive(secret)
    return Ed25519PrivateKey.from_private_bytes(seed)


def _secret_of(data: bytes) -> bytes:
    """Return what is secret of a private key, however it is written down."""
    load = load_ssh_private_key if b"BEGIN OPENSSH" in data else load_pem_private_key
    key = load(data.strip() + b"\n", password=None)
    return key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())


def _write_once(path: Path, key: Ed25519PrivateKey) -> None:
    with _beside(path, key) as whole, contextlib.suppress(FileExistsError):
        os.link(whole, path)


@contextlib.contextmanager
def _beside(path: Path, key: Ed25519PrivateKey) -> Iterator[Path]:
    """Give a whole file with the key, for its owner only, beside `path`; what is left of it goes."""
    beside = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}")
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
        yield beside
    finally:
        beside.unlink(missing_ok=True)
