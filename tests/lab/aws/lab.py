"""The lab: an emulated AWS for the time of a `with` block; its environment, its calls, its faults, what is in it."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import boto3
import botocore.config
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

from tests.iam.judge import Document, Rights
from tests.lab.aws import (
    births,
    drills,
    faults,
    instances,
    objects,
    pricelist,
    repairs,
    scaling_calls,
    strict,
    tables,
)
from tests.lab.aws.calls import Call
from tests.lab.aws.front import Front
from tests.lab.aws.inventory import inventory
from tests.lab.aws.permissions import OWN_AGENT, Judged, Permissions
from tests.lab.aws.plugins import plugin_folder
from tests.lab.aws.pump import Pump
from tests.lab.aws.quotas import ServiceQuotas
from tests.lab.aws.sessions import Sessions
from tests.lab.aws.stale import STALE, History
from tests.lab.aws.world import ACCESS_KEY, REGION, SECRET_KEY, Death, Machines, World, forget, now

__all__ = ["OWN_AGENT", "Lab"]


class Lab:
    """One emulated AWS; one at a time in a process, since moto's state is the process's.

    `world` holds its switches: `notice_s`, `boot_s`, `stale_s`, `has_launch_instances`, … `machines` is called with the
    folder and the URL when the lab opens and gives what stands behind the instances; without it they run by themselves.
    """

    _stands = threading.Lock()

    def __init__(
        self,
        folder: Path,
        *,
        machines: Callable[[Path, str], Machines] | Machines | None = None,
        notice_s: float = 120.0,
    ) -> None:
        self.folder = folder
        self.world = World(notice_s=notice_s)
        self.faults = faults.Faults()
        self.prices: tables.Prices = {}  # "g4dn.xlarge/us-east-1a": [(from when, "0.21")], before the lab's own
        self.world.prices = self.prices
        self.url = ""
        self._untagged: list[str] = []
        self._make_machines = machines
        self._patches = repairs.Patches()
        self._tokens = strict.Tokens()
        self._collisions = objects.Collisions()
        self._permissions = Permissions()
        self._history = History(self.world)
        self._sessions = Sessions(self.world, self._permissions)
        self.service_quotas = ServiceQuotas(self.world)

    def __enter__(self) -> Lab:
        if not self._stands.acquire(blocking=False):
            raise AssertionError("another lab stands in this process: two would do everything twice")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._install()
        forget()
        self._front = Front(
            DomainDispatcherApplication(create_backend_app),
            log=self.folder / "calls.jsonl",
            rules=self.faults,
            lock=self.world.lock,
            own=self._own,
            done=self._done,
            around=self._around,
        )
        self._server = make_server("127.0.0.1", 0, self._front, threaded=True, request_handler=_Handler)
        self.url = f"http://127.0.0.1:{self._server.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()
        if self._make_machines is not None:
            made = self._make_machines
            self.world.machines = made(self.folder / "machines", self.url) if callable(made) else made
        self._pump = Pump(self.world, self._history)
        self._pump.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._pump.stop()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)
        if self.world.machines is not None:
            self.world.machines.close()
        with self.world.lock:
            self._patches.undo()
            forget()
        self._stands.release()
        if self._pump.broken and error is None:
            raise AssertionError("the lab itself broke:\n" + self._pump.broken[0])

    # ---- what others need of it

    @property
    def settings(self) -> dict[str, str]:
        """What gpucloud, boto3, Terraform and the AWS CLI need to meet this AWS and no other."""
        empty = self.folder / "no-aws-config"
        empty.touch()
        plugins = plugin_folder()
        port = self.world.machines.port if self.world.machines else None
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_CONFIG_FILE": str(empty),
            "AWS_SHARED_CREDENTIALS_FILE": str(empty),
            "AWS_EC2_METADATA_DISABLED": "true",
            "GPUCLOUD_HOME": str(self.folder / "home"),
            "GPUCLOUD_SSH_CIDR": "127.0.0.1/32",
            "CHECKPOINT_DISABLE": "1",
            **({"GPUCLOUD_TF_PLUGIN_DIR": str(plugins)} if plugins else {}),
            **({"GPUCLOUD_SSH_PORT": str(port)} if port else {}),
        }

    @property
    def env(self) -> dict[str, str]:
        """The whole environment of a child process: this one's, without its AWS, with the lab's."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "GPUCLOUD_", "TF_"))}
        return kept | self.settings

    def client(self, service: str, region: str = REGION) -> Any:
        """Return a boto3 client of this AWS that repeats nothing."""
        return boto3.client(
            service,
            region_name=region,
            endpoint_url=self.url,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=botocore.config.Config(
                retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}, user_agent_extra=OWN_AGENT
            ),
        )

    # ---- what is in it, and what was asked of it

    @property
    def calls(self) -> list[Call]:
        """Every call so far, in the order of its answer."""
        return list(self._front.calls)

    def hear(self, listener: Callable[[dict[str, Any], bytes], None]) -> None:
        """Have every request from now on, as WSGI gives it, and its body, told to a listener."""
        self._front.hears = listener

    @property
    def delays(self) -> dict[str, float]:
        """Seconds by action (`*`: every other) that each answer waits."""
        return self._front.delays

    @property
    def untagged(self) -> list[str]:
        """What was born without `gpucloud:managed`, where a tag can be given at birth."""
        return [*self._untagged, *self.world.untagged]

    def inventory(self) -> tuple[str, ...]:
        """Return one line for each thing that stands."""
        with self.world.lock:
            return inventory()

    @property
    def judged(self) -> list[Judged]:
        """Every call that was judged by IAM so far: those of roles, and the caller's after `let_caller`."""
        return list(self._permissions.judged)

    # ---- its switches

    def let_caller(self, documents: Iterable[Document] | None, boundary: Document | None = None) -> None:
        """Give gpucloud's own keys these policies, under a boundary, and judge each of its calls by them; None: all."""
        self._permissions.caller = None if documents is None else Rights.of(documents, boundary)

    @property
    def capacity(self) -> dict[str, int]:
        """How many more instances a pool gives, by `g4dn.xlarge/us-east-1a/spot` (`…/on_demand`); absent: no limit.

        Counts down with every launch; what ends does not come back.
        """
        return self.world.capacity

    @property
    def quotas(self) -> dict[str, float]:
        """vCPU limits by quota code; absent: 768."""
        return self.world.quotas

    @property
    def deaths(self) -> dict[str, Death]:
        """How the next instances of a pool die before they run; see die_at_launch."""
        return self.world.deaths

    @property
    def notice_s(self) -> float:
        """Seconds from a notice to the end."""
        return self.world.notice_s

    @notice_s.setter
    def notice_s(self, seconds: float) -> None:
        self.world.notice_s = seconds

    @property
    def stale_s(self) -> float:
        """By how many seconds DescribeInstances and DescribeAutoScalingGroups lag behind."""
        return self.world.stale_s

    @stale_s.setter
    def stale_s(self, seconds: float) -> None:
        self.world.stale_s = seconds

    def lag_by_chance(self, seconds: float, *, seed: int = 0) -> None:
        """Let each of those listings lag behind by a time of its own, up to so many seconds; 0: by none."""
        self.world.stale_s = seconds
        self.world.stale_random = random.Random(seed) if seconds else None

    def collide(self, share: float, *, seed: int = 0) -> None:
        """Answer a share of all conditional writes to S3 with 409: another's is under way, nothing is written."""
        self._collisions.share, self._collisions.random = share, random.Random(seed)

    @property
    def has_launch_instances(self) -> bool:
        """Whether Auto Scaling knows LaunchInstances; if not, it answers InvalidAction."""
        return self.world.has_launch_instances

    @has_launch_instances.setter
    def has_launch_instances(self, known: bool) -> None:
        self.world.has_launch_instances = known

    def die_at_launch(
        self,
        pool: str,
        code: str = "Client.InternalError",
        message: str = "Client.InternalError: Client error on launch",
        times: int = 1,
    ) -> None:
        """Let the next instances of a pool end before they run, as with a KMS key that may not be used."""
        self.world.deaths[pool] = Death(code=code, message=message, times=times)

    def notice(self, instance_id: str) -> datetime:
        """Give a spot instance its notice; return when it is taken."""
        with self.world.lock:
            at = now() + timedelta(seconds=self.world.notice_s)
            instances.life(self.world.instance(instance_id)).ends_at = at
            if self.world.machines is not None:
                self.world.machines.notice(instance_id, at)
        return at

    def take(self, instance_id: str) -> None:
        """Take a spot instance at once, without a notice."""
        with self.world.lock:
            instances.take_away(self.world, self.world.instance(instance_id))

    def power_off(self, instance_id: str) -> None:
        """Let an instance shut itself down, as its agent's timer would."""
        with self.world.lock:
            instances.end(self.world, self.world.instance(instance_id), instances.POWERED_OFF)

    def freeze(self, instance_id: str) -> None:
        """Stop an instance's machine without its end: it answers nothing."""
        if self.world.machines is not None:
            self.world.machines.freeze(instance_id)

    # ---- inside

    def _install(self) -> None:
        repairs.install(self._patches)
        strict.install(self._patches)
        instances.install(self._patches, self.world)
        births.install(self._patches, self.world)
        scaling_calls.install(self._patches, self.world)
        tables.install(self._patches, self.world, self.prices)
        drills.install(self._patches, self.world, self.notice)

    def _own(self, call: Call, body: bytes, environ: dict[str, Any]) -> faults.Reply | None:
        if call.action == "LaunchInstances" and not self.world.has_launch_instances:
            message = "Could not find operation LaunchInstances for version 2011-01-01"
            return faults.error(call.service, "InvalidAction", message, 400)
        refused = self._permissions.denied(call, body) or strict.denied(call, environ)
        refused = refused or objects.refused(call, environ, body) or self._collisions.refused(call, environ)
        refused = refused or self._tokens.reply(call) or self._sessions.answer(call)
        return refused or self.service_quotas.answer(call) or pricelist.answer(call)

    def _done(self, call: Call, body: bytes, said: bytes) -> None:
        self._tokens.remember(call, said)
        line = strict.untagged(call, body)
        if line is not None:
            self._untagged.append(line)

    @contextlib.contextmanager
    def _around(self, call: Call) -> Iterator[None]:
        self._history.keep()
        if self.world.stale_s > 0 and call.action in STALE:
            with self._history.as_of(time.time() - self._lag_s()):
                yield
        else:
            yield

    def _lag_s(self) -> float:
        chance = self.world.stale_random
        return self.world.stale_s if chance is None else chance.uniform(0.0, self.world.stale_s)


class _Handler(MotoRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes: 40 ms a call otherwise

    def log_request(self, *_args: object) -> None:
        pass
