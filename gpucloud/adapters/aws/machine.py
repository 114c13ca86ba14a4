"""One machine: its image, its first boot, its host key."""

from __future__ import annotations

import base64
import binascii
import math
import re
import shlex
import threading
import time
from collections.abc import Callable
from typing import Any

from gpucloud.adapters.aws.account import account_of
from gpucloud.adapters.aws.session import Aws
from gpucloud.adapters.home import bundled
from gpucloud.domain.errors import ProvisionError, UsageError
from gpucloud.domain.job.spec import AwsChoices
from gpucloud.store import ObjectStore

# The user data of AWS machines: the script of their first boot, with what it must know.


USER_DATA_BYTES = 16 * 1024
"""What EC2 takes, before its base64."""

POWER_OFF = (
    "sudo",
    "sh",
    "-c",
    'end="${GPUCLOUD_BOOT_DIR:-/var/lib/gpucloud}/end"; '
    '[ ! -x "$end" ] || timeout 60 "$end" || sleep 60; exec shutdown -h now',
)
"""How a machine ends itself: the script of its first boot lowers its group, or another one would be started."""

_END = "GPUCLOUD_FIRST_BOOT"
_TEXT = """#!/bin/sh
umask 077
d="${{GPUCLOUD_BOOT_DIR:-/var/lib/gpucloud}}"
mkdir -p "$d"
cat >"$d/first_boot.py" <<'{end}'
{script}{end}
cat >"$d/end" <<'{end}'
#!/bin/sh
exec python3 -I "${{0%/*}}/first_boot.py" end
{end}
chmod 700 "$d/end"
exec python3 -I "$d/first_boot.py" {words}
"""


def user_data(*, store_url: str, cluster: str, region: str) -> str:
    """Return a shell script that publishes the machine's host key; nothing in it is secret. Raises UsageError.

    The object is `<store>/clusters/<cluster>/hosts/<role id>:<instance id>`. The same arguments give the same text, so
    that Terraform sees no change. A machine on which no agent is started within 30 minutes powers itself off.
    """
    if not store_url.startswith("s3://"):
        raise UsageError(f"store: {store_url}: machines on AWS cannot write there", hint="store: s3://BUCKET/PREFIX")
    words = shlex.join((store_url, cluster, region))
    script = bundled("templates", "node", "first_boot.py").read_text(encoding="utf-8")
    text = _TEXT.format(script=script, words=words, end=_END)
    if len(text.encode()) > USER_DATA_BYTES:
        raise UsageError(f"store: {store_url}: too long for a machine's user data", hint="choose a shorter prefix")
    return text


# The host keys of AWS machines: what each published under its role's name, else what its console shows.


CONSOLE_AFTER_S = 30.0
CONSOLE_EVERY_S = 10.0

_CONSOLES_A_SECOND = 8  # AWS counts this call against the whole account
_LISTING_LASTS_S = 0.5
_BLOCK = re.compile(r"-----BEGIN SSH HOST KEY KEYS-----\r?\n(.*?)-----END SSH HOST KEY KEYS-----", re.DOTALL)
_INSTANCE_ID = re.compile(r"i-[0-9a-f]{1,32}")
_ED25519_BYTES = 51  # its name and its 32 bytes, each with its length before it
_KIND = "ssh-ed25519"


class HostKeys:
    """The Ed25519 host keys of one cluster's machines. Thread-safe; machines asked for at once cost one listing.

    `role_id` is the cluster's role, when it is known: a key that another role published is then refused. `console`
    returns a machine's console output, None or empty while there is none; it is asked for a machine that has told no
    key for `console_after_s`, and then every `CONSOLE_EVERY_S` at most. What was found is remembered by instance id:
    an address is used again, an id never.
    """

    def __init__(
        self,
        store: ObjectStore,
        cluster: str,
        *,
        role_id: str | None = None,
        console: Callable[[str], str | None] | None = None,
        console_after_s: float = CONSOLE_AFTER_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._folder = hosts_folder(cluster)
        self._role_id = role_id
        self._console = console
        self._console_after_s = console_after_s
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._known: dict[str, str] = {}
        self._listing: tuple[float, tuple[str, ...]] = (-math.inf, ())
        self._due: dict[str, float] = {}
        self._asked: list[float] = []

    def of(self, instance_id: str) -> str | None:
        """Return `ssh-ed25519 AAAA…`, None while the machine has told none. Raises what the store and console raise."""
        if instance_id not in self._known:
            found = self._published(instance_id) or self._shown(instance_id)
            if found is None:
                return None
            self._known[instance_id] = found
        return self._known[instance_id]

    def _published(self, instance_id: str) -> str | None:
        if _INSTANCE_ID.fullmatch(instance_id) is None:
            return None
        stored = [self._store.get(name) for name in self._names(instance_id)]
        keys = {key for one in stored if one is not None and (key := parse(one.data))}
        # Two roles that speak for one machine: without the role's id nobody can say which of them lies.
        return keys.pop() if len(keys) == 1 else None

    def _names(self, instance_id: str) -> tuple[str, ...]:
        if self._role_id is not None:
            return (f"{self._folder}{self._role_id}:{instance_id}",)
        return tuple(name for name in self._listed() if name.endswith(f":{instance_id}"))

    def _listed(self) -> tuple[str, ...]:
        with self._lock:
            if self._monotonic() - self._listing[0] >= _LISTING_LASTS_S:
                names = tuple(self._store.list(self._folder))
                self._listing = (self._monotonic(), names)
            return self._listing[1]

    def _shown(self, instance_id: str) -> str | None:
        if self._console is None or not self._is_due(instance_id):
            return None
        text = self._console(instance_id)
        return from_console(text) if text else None

    def _is_due(self, instance_id: str) -> bool:
        """Whether the console may be asked now, and note that it is."""
        with self._lock:
            now = self._monotonic()
            due = self._due.setdefault(instance_id, now + self._console_after_s)
            self._asked = [at for at in self._asked if now - at < 1]
            if now < due or len(self._asked) >= _CONSOLES_A_SECOND:
                return False
            self._due[instance_id] = now + CONSOLE_EVERY_S
            self._asked.append(now)
            return True


def hosts_folder(cluster: str) -> str:
    """Return the prefix below which a cluster's machines publish their keys."""
    return f"clusters/{cluster}/hosts/"


def parse(data: bytes) -> str | None:
    """Return the key in what a machine published: one line, an Ed25519 key, at most a comment; None for all else."""
    try:
        text = data.decode("ascii").removesuffix("\n")
    except UnicodeDecodeError:
        return None
    words = text.split(" ")
    if len(words) not in {2, 3} or words[0] != _KIND or any(char.isspace() for word in words for char in word):
        return None
    return f"{_KIND} {words[1]}" if _is_ed25519(words[1]) else None


def from_console(text: str) -> str | None:
    """Return the Ed25519 key that cloud-init printed; None when the block is not whole yet, or two of them differ."""
    found = {
        key
        for block in _BLOCK.findall(text)
        for line in block.splitlines()
        if (key := parse(line.strip().encode("ascii", errors="replace")))
    }
    return found.pop() if len(found) == 1 else None


def _is_ed25519(word: str) -> bool:
    try:
        data = base64.b64decode(word, validate=True)
    except (binascii.Error, ValueError):
        return False
    return len(data) == _ED25519_BYTES and data.startswith(b"\x00\x00\x00\x0bssh-ed25519\x00\x00\x00\x20")


# Machine images: which one a job is pinned to, only from owners that are trusted; how its root disk is called.


# AWS's and Canonical's public parameters: always the newest image, the same name in every region.
_PARAMETERS = {
    "deep-learning": "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id",
    "ubuntu": "/aws/service/canonical/ubuntu/server/22.04/stable/current/amd64/hvm/ebs-gp2/ami-id",
}
_CANONICAL = {"aws": "099720109477", "aws-cn": "837727238323", "aws-us-gov": "513442679011"}


def resolve(aws: Aws, choices: AwsChoices, region: str) -> str:
    """Return the id of the image that the job file's choice is now (`ami-…`).

    ProvisionError when there is none, its owner is not trusted, or no GPU machine of ours can start from it.
    """
    image = _described(aws, _image_id(aws, choices.image, region), region)
    _check_owner(aws, choices, image)
    _check_use(choices, image)
    return str(image["ImageId"])


def root_device(aws: Aws, image_id: str, region: str) -> str:
    """Return what the image calls its root disk (`/dev/sda1`): under another name a second disk would be added.

    ProvisionError when there is no such image, or its root is no disk.
    """
    image = _described(aws, image_id, region)
    if image.get("RootDeviceType", "ebs") != "ebs" or not image.get("RootDeviceName"):
        raise ProvisionError(f"the image {image_id} has no root disk", hint="name one with an EBS root")
    return str(image["RootDeviceName"])


def _described(aws: Aws, image_id: str, region: str) -> dict[str, Any]:
    with aws.calling("ec2", f"read the image {image_id}", region) as ec2:
        found = ec2.describe_images(ImageIds=[image_id])["Images"]
    if not found:
        raise ProvisionError(
            f"there is no image {image_id} in {region}", hint="correct `aws: {image: …}`, or leave it out"
        )
    image: dict[str, Any] = found[0]
    return image


def _image_id(aws: Aws, choice: str, region: str) -> str:
    if choice.startswith("ami-"):
        return choice
    name = choice.removeprefix("ssm:") if choice.startswith("ssm:") else _PARAMETERS.get(choice)
    if name is None:
        raise ProvisionError(
            f"{choice!r} is no image", hint="aws: {image: deep-learning}, ubuntu, ami-… or ssm:/parameter/path"
        )
    with aws.calling("ssm", f"find the image {choice} in {region} ({name})", region) as ssm:
        return str(ssm.get_parameter(Name=name)["Parameter"]["Value"])


def _check_owner(aws: Aws, choices: AwsChoices, image: dict[str, Any]) -> None:
    owner, alias = str(image.get("OwnerId", "")), str(image.get("ImageOwnerAlias", ""))
    # "amazon" is given by AWS to its own images and to those of verified publishers, and cannot be chosen.
    trusted = {_CANONICAL.get(aws.partition, ""), *choices.image_owners}
    if alias == "amazon" or {owner, alias} & trusted or owner == account_of(aws):
        return
    raise ProvisionError(
        f"the image {image['ImageId']} belongs to account {owner}, which is not trusted",
        hint=f"aws: {{image_owners: ['{owner}']}} if you know whose that is",
    )


def _check_use(choices: AwsChoices, image: dict[str, Any]) -> None:
    image_id = image["ImageId"]
    if image.get("Architecture") != "x86_64":
        raise ProvisionError(
            f"the image {image_id} is for {image.get('Architecture')} machines", hint="name one for x86_64"
        )
    if image.get("State") != "available":
        raise ProvisionError(
            f"the image {image_id} is {image.get('State')}, not available", hint="name another, or wait until it is"
        )
    least = max(
        (int(disk.get("Ebs", {}).get("VolumeSize", 0)) for disk in image.get("BlockDeviceMappings", ())), default=0
    )
    if least > choices.disk_gib:
        raise ProvisionError(
            f"the image {image_id} needs a disk of {least} GiB, not {choices.disk_gib}",
            hint=f"aws: {{disk_gib: {least}}}",
        )
