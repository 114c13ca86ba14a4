"""Real SSH machines for the emulated EC2, made of the embedded cloud's parts.

Each has a loopback address of its own, a host key of its own, a metadata service with its role's credentials, and a
process tree that ends as a whole. What its processes know of AWS is the endpoint and the region: keys come from the
metadata service, as on EC2.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from gpucloud.adapters.aws.prices import catalog
from gpucloud.adapters.local import node
from gpucloud.adapters.local.ground import Instance, Launch, Metadata, _Handler, _look_up, document, tree
from gpucloud.adapters.local.node import new_host_key
from tests.standins.gpus import write_nvidia_smi

# Below the ports that the kernel gives out, so that no connection of somebody else sits on one.
_PORTS = range(20000, 32000)
# Says to what runs on a machine that its GPUs are named, not there: nothing can be computed on them.
STAND_IN = "GPUCLOUD_STAND_IN_GPUS"
_KEYS_LAST = timedelta(hours=6)

_SHUTDOWN = """#!/bin/sh
# As on Ubuntu: shutdown [-h|-P] [now|+MINUTES], shutdown -c
when=+1
for word in "$@"; do
    case "$word" in
        -c) kill "$(cat '{folder}/shutdown.pid')"; exit 0 ;;
        now) when=+0 ;;
        +*) when=$word ;;
    esac
done
seconds=$((${{when#+}} * 60))
if [ "$seconds" -eq 0 ]; then : >'{folder}/powered-off'; exit 0; fi
(sleep "$seconds"; : >'{folder}/powered-off') </dev/null >/dev/null 2>&1 &
echo $! >'{folder}/shutdown.pid'
"""
_POWEROFF = "#!/bin/sh\n: >'{folder}/powered-off'\n"
# What would change the machine that all this runs on. Its software is as an image with everything has it.
_NEVER = ("apt", "apt-get", "dnf", "yum", "modprobe", "systemctl", "reboot", "apt-mark")
_REFUSES = """#!/bin/sh
echo "$0: an emulated machine has no software of its own to change" >&2
exit 1
"""
_SUDO = """#!/bin/sh
while :; do case "$1" in -u) shift 2 ;; --) shift; break ;; -*) shift ;; *) break ;; esac; done
exec "$@"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """The role of an instance profile, and the keys that its machine gets from the metadata service."""

    name: str
    role_id: str
    arn: str
    access_key: str
    secret_key: str
    token: str


@dataclass(frozen=True, slots=True)
class Address:
    """Where a machine's SSH server listens."""

    address: str
    port: int


class Machines:
    """The machines of one emulated AWS; all listen on `port`. Every call may come from any thread."""

    def __init__(self, folder: Path, *, endpoint_url: str, region: str) -> None:
        self.port = _free_port()
        self.lacking = 0  # so many of the next machines list one GPU less than their type has
        self._folder = folder
        self._endpoint_url = endpoint_url
        self._region = region
        self._lock = threading.Lock()
        self._machines: dict[str, _Machine] = {}
        self._launched = 0
        self._pipe, self._held_end = os.pipe()
        folder.mkdir(parents=True, exist_ok=True)

    def launch(
        self,
        id: str,  # noqa: A002
        *,
        instance_type: str,
        zone: str,
        spot: bool,
        image_user: str,
        public_key: str,
        user_data: str = "",
        role: Role | None = None,
        account: str = "123456789012",
        extra_env: Mapping[str, str] | None = None,
    ) -> Address:
        """Start a machine and return where its SSH will be; `answers` says when. OSError when it cannot be started."""
        with self._lock:
            listener = self._listen()
            machine = _Machine(
                listener=listener,
                instance=Instance(
                    id=id,
                    instance_type=instance_type,
                    region=self._region,
                    zone=zone,
                    spot=spot,
                    address=listener.getsockname()[0],
                    noticed_at=None,
                    interrupted_at=None,
                ),
                folder=self._folder / id,
                role=role,
                account=account,
                image_user=image_user,
            )
            self._machines[id] = machine
            machine.lacks, self.lacking = int(self.lacking > 0), max(0, self.lacking - 1)
        env = {
            "AWS_ENDPOINT_URL": self._endpoint_url,
            "AWS_REGION": self._region,
            "GPUCLOUD_SSH_PORT": str(self.port),
            "GPUCLOUD_BOOT_DIR": str(machine.folder / "boot"),
            "GPUCLOUD_DATA_ROOT": str(machine.folder / "disk"),  # the disks that are mounted here are somebody's own
            STAND_IN: "1",
            **(extra_env or {}),
        }
        machine.start(self._boot(machine, public_key, user_data, env), self._pipe)
        return Address(machine.instance.address, self.port)

    def notice(self, id: str, at: datetime) -> None:  # noqa: A002
        """Tell the machine, through its metadata service, that it is taken at `at`."""
        self._machines[id].post_notice(at)

    def recommend_rebalance(self, id: str) -> None:  # noqa: A002
        """Tell the machine that its risk has risen; it may never be taken."""
        self._machines[id].rebalance_at = datetime.now(timezone.utc)

    def end(self, id: str) -> None:  # noqa: A002
        """End the machine with everything on it, and return when it is gone; one that is gone already is no error."""
        with self._lock:
            machine = self._machines.pop(id, None)
        if machine is not None:
            machine.end()

    def freeze(self, id: str) -> None:  # noqa: A002
        """Stop every process of the machine: it answers nothing and yet is there."""
        machine = self._machines[id]
        node.freeze(id, machine.process)

    def answers(self, id: str) -> bool:  # noqa: A002
        """Whether an SSH server greets; waits for a few milliseconds, and goes on listening in the next call."""
        machine = self._machines.get(id)
        return machine is not None and machine.greets(self.port)

    def powered_off(self) -> frozenset[str]:
        """Return the machines that shut themselves down, or whose first process died; nothing of them runs any more."""
        with self._lock:
            off = {id_: machine for id_, machine in self._machines.items() if machine.is_off}
        for machine in off.values():
            machine.end()
        return frozenset(off)

    def alive(self) -> frozenset[str]:
        """Return the machines that were launched and not ended."""
        with self._lock:
            return frozenset(self._machines)

    def console(self, id: str) -> str:  # noqa: A002
        """Return what the machine's console shows: the user data's output, then the host keys, as cloud-init does."""
        folder = self._folder / id
        log = folder / "user-data.log"
        if not (folder / "host_key.pub").exists():
            return ""
        said = log.read_text(errors="replace") if log.exists() else ""
        running = (folder / "user-data").exists() and not (folder / "user-data.exit").exists()
        return said if running else said + _key_block((folder / "host_key.pub").read_text().strip(), id)

    def user_data_exit(self, id: str) -> int | None:  # noqa: A002
        """Return the exit code of the user data, None until it has ended."""
        path = self._folder / id / "user-data.exit"
        return int(path.read_text()) if path.exists() else None

    def metadata_url(self, id: str) -> str:  # noqa: A002
        """Return where the machine finds its metadata service."""
        return self._machines[id].metadata.url

    def host_key(self, id: str) -> str:  # noqa: A002
        """Return the machine's true public host key, for tests to compare with."""
        return " ".join((self._folder / id / "host_key.pub").read_text().split()[:2])

    def close(self) -> None:
        """End every machine."""
        for id_ in list(self._machines):
            self.end(id_)
        for descriptor in (self._pipe, self._held_end):
            os.close(descriptor)

    def _listen(self) -> socket.socket:
        """Return a socket on an address that no machine of this cloud ever had: EC2's come back, ours must not."""
        while True:
            number = self._launched
            self._launched += 1
            address = f"127.1.{number // 200}.{10 + number % 200}"
            try:
                return socket.create_server((address, self.port), backlog=256)
            except OSError:
                if number > 5000:
                    raise

    def _boot(self, machine: _Machine, public_key: str, user_data: str, env: dict[str, str]) -> _Boot:
        return _Boot(
            id=machine.instance.id,
            folder=machine.folder,
            server=node.server_command(),
            public_key=public_key,
            host_key=machine.host_key,
            user_data=user_data,
            variables={"AWS_EC2_METADATA_SERVICE_ENDPOINT": machine.metadata.url},
            layers=self._folder / "layers",
            image_user=machine.image_user,
            extra=env,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Boot(node.Boot):
    """An embedded node's boot with an image's user, AWS's environment and the programs that end a machine."""

    image_user: str
    extra: Mapping[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        base = node.Boot.environment(self)
        return {
            **base,
            "PATH": f"{self.folder / 'bin'}:{base['PATH']}",
            "USER": self.image_user,
            "LOGNAME": self.image_user,  # whom the SSH server lets in
            "GPUCLOUD_HOST_KEY_FILE": str(self.folder / "host_key.pub"),
            **self.extra,
        }


class _Ground:
    """This machine itself: what `node.start` asks of the ground."""

    start = staticmethod(Launch.start)


class _Machine:
    """One machine, from its launch to its end."""

    def __init__(
        self,
        *,
        listener: socket.socket,
        instance: Instance,
        folder: Path,
        role: Role | None,
        account: str,
        image_user: str,
    ) -> None:
        self.instance = instance
        self.folder = folder
        self.role = role
        self.account = account
        self.image_user = image_user
        self.rebalance_at: datetime | None = None
        self.lacks = 0
        self.host_key = new_host_key()
        self.metadata = _RoleMetadata(self)
        self._listener = listener
        self._process: subprocess.Popen[bytes] | None = None
        self._greeting: socket.socket | None = None
        self._serves = False
        self._asking = threading.Lock()
        self._ended = threading.Lock()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise OSError(f"{self.instance.id} was never started")
        return self._process

    def start(self, boot: _Boot, parent_pipe: int) -> None:
        self._serves = True
        threading.Thread(target=self.metadata.serve_forever, args=(0.02,), daemon=True).start()
        binaries = self.folder / "bin"
        binaries.mkdir(parents=True)
        for name, text in (("shutdown", _SHUTDOWN), ("poweroff", _POWEROFF), ("sudo", _SUDO)):
            program = binaries / name
            program.write_text(text.format(folder=self.folder) if name != "sudo" else text)
            program.chmod(0o755)
        for name in _NEVER:
            program = binaries / name
            program.write_text(_REFUSES)
            program.chmod(0o755)
        _put_gpus(binaries, self.instance.instance_type, lacks=self.lacks)
        (self.folder / "host_key.pub").write_text(f"{self.host_key.public} root@{self.instance.id}\n")
        self._process = node.start(boot, _Ground(), self._listener, parent_pipe)

    def post_notice(self, at: datetime) -> None:
        self.instance = replace(self.instance, noticed_at=datetime.now(timezone.utc), interrupted_at=at)

    def greets(self, port: int) -> bool:
        with self._asking:
            try:
                if self._greeting is None:
                    self._greeting = socket.create_connection((self.instance.address, port), timeout=1.0)
                    self._greeting.settimeout(0.01)
                said = self._greeting.recv(4)
            except TimeoutError:  # it boots, or is frozen
                return False
            except OSError:
                said = b""
            self._hang_up()
            return said == b"SSH-"

    def _hang_up(self) -> None:
        if self._greeting is not None:
            self._greeting.close()
            self._greeting = None

    @property
    def is_off(self) -> bool:
        died = self._process is not None and self._process.poll() is not None
        return died or (self.folder / "powered-off").exists()

    def end(self) -> None:
        with self._ended:
            if self._process is not None and not node.destroy(self.instance.id, self._process):
                raise OSError(f"{self.instance.id} does not end")
            self._listener.close()
            with self._asking:
                self._hang_up()
            if self._serves:  # else nobody would ever answer that it is shut down
                self.metadata.shutdown()
            self.metadata.server_close()
            shutil.rmtree(self.folder / "home", ignore_errors=True)


class _RoleMetadata(Metadata):
    """The embedded cloud's metadata service, with the role of the instance profile and the account."""

    def __init__(self, machine: _Machine) -> None:
        super().__init__(machine.instance.address, lambda: machine.instance)
        self.RequestHandlerClass = _RoleHandler
        self.machine = machine

    def told(self) -> dict[str, str]:
        """Return everything below `/latest/meta-data/`."""
        machine = self.machine
        more = {"mac": "02:00:00:00:00:01", "ami-id": "ami-0lab"}
        if machine.rebalance_at is not None:
            at = machine.rebalance_at.strftime("%Y-%m-%dT%H:%M:%SZ")
            more["events/recommendations/rebalance"] = json.dumps({"noticeTime": at})
        if machine.role is not None:
            more["iam/info"] = json.dumps(_info(machine.role, machine.account))
            more[f"iam/security-credentials/{machine.role.name}"] = json.dumps(_credentials(machine.role), indent=2)
        return {**more, **tree(machine.instance)}

    def identity(self) -> str:
        """Return the instance identity document."""
        return json.dumps({**json.loads(document(self.machine.instance)), "accountId": self.machine.account}, indent=2)


class _RoleHandler(_Handler):
    server: _RoleMetadata

    def do_GET(self) -> None:  # noqa: N802 - http.server's name
        if not self.server.knows(self.headers.get("X-aws-ec2-metadata-token", "")):
            self._answer(401)
            return
        if self.path.rstrip("/") == "/latest/dynamic/instance-identity/document":
            self._answer(200, self.server.identity())
            return
        found = _look_up(self.server.told(), self.path)
        self._answer(404 if found is None else 200, found or "")


def _put_gpus(folder: Path, instance_type: str, *, lacks: int) -> None:
    """Put a stand-in nvidia-smi there that lists the GPUs of the type; a type that is not known has none."""
    machine = catalog.load().machines.get(instance_type)
    if machine is not None:
        write_nvidia_smi(
            folder,
            name=f"NVIDIA {machine.gpu}",
            count=machine.gpus - lacks,
            memory_mib=machine.vram_gib * 1024 - 500,
        )


def _credentials(role: Role) -> dict[str, Any]:
    now = datetime.now(timezone.utc)
    return {
        "Code": "Success",
        "LastUpdated": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "Type": "AWS-HMAC",
        "AccessKeyId": role.access_key,
        "SecretAccessKey": role.secret_key,
        "Token": role.token,
        "Expiration": (now + _KEYS_LAST).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def _info(role: Role, account: str) -> dict[str, str]:
    return {
        "Code": "Success",
        "LastUpdated": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "InstanceProfileArn": f"arn:aws:iam::{account}:instance-profile/{role.name}",
        "InstanceProfileId": "AIPALABLABLABLABLABLA",
    }


def _key_block(key: str, name: str) -> str:
    """Return cloud-init's two blocks; the fingerprints come first, through a logger that puts a word before them."""
    kind, data = key.split()[:2]
    return (
        "\nci-info: no authorized SSH keys fingerprints found for user root.\n"
        "<14>Jan  1 00:00:00 ec2: -----BEGIN SSH HOST KEY FINGERPRINTS-----\n"
        f"<14>Jan  1 00:00:00 ec2: 256 SHA256:0000000000000000000000000000000000000000000 root@{name} (ED25519)\n"
        "<14>Jan  1 00:00:00 ec2: -----END SSH HOST KEY FINGERPRINTS-----\n"
        f"-----BEGIN SSH HOST KEY KEYS-----\n{kind} {data} root@{name}\n-----END SSH HOST KEY KEYS-----\n"
        "Cloud-init finished\n"
    )


def _free_port() -> int:
    """Return a port that is free on every address now."""
    for port in random.Random(os.urandom(8)).sample(_PORTS, len(_PORTS)):
        try:
            with socket.create_server(("0.0.0.0", port)):
                return port
        except OSError:
            continue
    raise OSError(f"no port of {_PORTS} is free")
