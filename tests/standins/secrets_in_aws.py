"""Whether secrets of a job on the emulated AWS are anywhere where AWS, Terraform or another user can read them.

Looked at are every request and its body, every object and its versions, launch templates with their user data, tags,
parameters, the job's machines, and every file of the user's own folder whenever it changes: Terraform's too.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import gzip
import io
import json
import threading
import urllib.parse
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.standins.aws import Account

_ZIP, _GZIP = b"PK\x03\x04", b"\x1f\x8b"


class Secrets:
    """What is looked for: `words` by name. `wrong` says what was found where, `looked` counts by kind of place."""

    def __init__(self, words: Mapping[str, list[bytes]]) -> None:
        self.wrong: set[str] = set()
        self.looked: dict[str, int] = {}
        self._forms = {name: [form for word in given for form in _forms(word)] for name, given in words.items()}

    def look(self, kind: str, where: str, data: bytes) -> None:
        """Look through the data, and through what is packed in it."""
        self.looked[kind] = self.looked.get(kind, 0) + 1
        for part in _opened(data):
            for name, forms in self._forms.items():
                if any(form in part for form in forms):
                    self.wrong.add(f"{name} is in {where}")

    def hear(self, environ: dict[str, Any], body: bytes) -> None:
        """Look through a request: its address, its headers, its body."""
        said = {name: value for name, value in environ.items() if isinstance(value, str)}
        where = f"a request {environ['REQUEST_METHOD']} {environ['PATH_INFO']}"
        self.look("requests", where, urllib.parse.unquote_plus(json.dumps(said)).encode())
        self.look("requests", where, body)
        self.look("requests", where, urllib.parse.unquote_plus(body.decode(errors="replace")).encode())


class Files:
    """Looks through every file below a folder, again each time it has changed, while the block runs."""

    def __init__(self, folder: Path, secrets: Secrets) -> None:
        self._folder, self._secrets = folder, secrets
        self._seen: dict[Path, tuple[int, int]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_again, daemon=True)

    def __enter__(self) -> Files:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._look()

    def _look_again(self) -> None:
        while not self._over.wait(0.1):
            self._look()

    def _look(self) -> None:
        for path in self._folder.rglob("*"):
            with contextlib.suppress(OSError):
                about = path.lstat()
                if path.is_symlink() or not path.is_file() or self._seen.get(path) == (key := _key(about)):
                    continue
                self._secrets.look(_kind(path), str(path.relative_to(self._folder)), path.read_bytes())
                self._seen[path] = key


def look_through_aws(aws: Account, secrets: Secrets) -> None:
    """Look through what the account shows to anybody who may read it."""
    s3 = aws.lab.client("s3")
    for page in s3.get_paginator("list_object_versions").paginate(Bucket=aws.bucket):
        for one in page.get("Versions", ()):
            read = s3.get_object(Bucket=aws.bucket, Key=one["Key"], VersionId=one["VersionId"])
            with read["Body"] as body:
                secrets.look("objects", f"s3://{aws.bucket}/{one['Key']}", body.read())
    ec2 = aws.lab.client("ec2")
    for template in ec2.describe_launch_templates()["LaunchTemplates"]:
        found = ec2.describe_launch_template_versions(LaunchTemplateId=template["LaunchTemplateId"])
        for version in found["LaunchTemplateVersions"]:
            data = base64.b64decode(version["LaunchTemplateData"].get("UserData", ""))
            secrets.look("user data", "the launch template's user data", data)
    shown = {
        "instances": ec2.describe_instances(),
        "templates": ec2.describe_launch_templates(),
        "tags": ec2.describe_tags(),
        "groups": aws.lab.client("autoscaling").describe_auto_scaling_groups(),
        "parameters": aws.lab.client("ssm").describe_parameters(),
        "roles": aws.lab.client("iam").get_account_authorization_details(),
    }
    for what, answer in shown.items():
        secrets.look("listings", f"the account's {what}", json.dumps(answer, default=str).encode())


def _forms(word: bytes) -> Iterator[bytes]:
    """Yield the word, and what of it is the same in base64 wherever it begins."""
    yield word
    for shift in range(3):
        coded = base64.b64encode(b"\0" * shift + word)
        yield coded[4 if shift else 0 : -4]


def _opened(data: bytes) -> Iterator[bytes]:
    yield data
    if data.startswith(_GZIP):
        with contextlib.suppress(OSError, EOFError, zlib.error):
            yield from _opened(gzip.decompress(data))
    if data.startswith(_ZIP):
        with contextlib.suppress(zipfile.BadZipFile), zipfile.ZipFile(io.BytesIO(data)) as pack:
            for name in pack.namelist():
                yield from _opened(pack.read(name))
    if data[:4] == b"H4sI":  # base64 of gzip
        with contextlib.suppress(binascii.Error):
            yield from _opened(base64.b64decode(data))


def _kind(path: Path) -> str:
    name = path.name
    if "tfstate" in name:
        return "state"
    return "variables" if "tfvars" in name else "modules" if ".tf" in name else "files"


def _key(about: Any) -> tuple[int, int]:
    return about.st_mtime_ns, about.st_size
