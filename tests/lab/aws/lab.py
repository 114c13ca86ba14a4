"""The lab: an emulated AWS for the time of a `with` block; its environment, its calls, its faults, what is in it."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import boto3
import botocore.config
from moto.moto_api._internal.models import moto_api_backend
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

from tests.lab.aws import repairs
from tests.lab.aws.calls import Call
from tests.lab.aws.faults import Faults, Reply
from tests.lab.aws.front import Front
from tests.lab.aws.plugins import plugin_folder

REGION = "us-east-1"
ACCOUNT = "123456789012"
# Look like keys, so that a test can look for them where no key may be; are none.
ACCESS_KEY = "AKIALABLABLABLAB0000"
SECRET_KEY = "LabSecretLabSecretLabSecretLabSecret0000"


class Lab:
    """One emulated AWS; one at a time in a process, since moto's state is the process's."""

    def __init__(self, folder: Path, *, notice_s: float = 120.0) -> None:
        self.folder = folder
        self.notice_s = notice_s
        self.faults = Faults()
        self.capacity: dict[str, int] = {}
        self.url = ""
        self._lock = threading.RLock()
        self._patches = repairs.Patches()

    def __enter__(self) -> Lab:
        self.folder.mkdir(parents=True, exist_ok=True)
        moto_api_backend.reset()
        repairs.install(self._patches)
        self._front = Front(
            DomainDispatcherApplication(create_backend_app),
            log=self.folder / "calls.jsonl",
            rules=self.faults,
            lock=self._lock,
            own=self._own,
            done=self._done,
        )
        self._server = make_server("127.0.0.1", 0, self._front, threaded=True, request_handler=_Handler)
        self.url = f"http://127.0.0.1:{self._server.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)
        self._patches.undo()
        moto_api_backend.reset()

    @property
    def calls(self) -> list[Call]:
        """Every call so far, in the order of its answer."""
        return list(self._front.calls)

    @property
    def delays(self) -> dict[str, float]:
        """Seconds by action (`*`: every other) that each answer waits."""
        return self._front.delays

    @property
    def settings(self) -> dict[str, str]:
        """What gpucloud, boto3, Terraform and the AWS CLI need to meet this AWS and no other."""
        empty = self.folder / "no-aws-config"
        empty.touch()
        plugins = plugin_folder()
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
        } | ({"GPUCLOUD_TF_PLUGIN_DIR": str(plugins)} if plugins else {})

    @property
    def env(self) -> dict[str, str]:
        """The whole environment of a child process: this one's, without its AWS, with the lab's."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "GPUCLOUD_", "TF_"))}
        return kept | self.settings

    def client(self, service: str, region: str = REGION) -> Any:
        """Return a boto3 client of this AWS."""
        return boto3.client(
            service,
            region_name=region,
            endpoint_url=self.url,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=botocore.config.Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}),
        )

    def _own(self, _call: Call, _body: bytes) -> Reply | None:
        return None

    def _done(self, call: Call, body: bytes, said: bytes) -> None:
        pass


class _Handler(MotoRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes: 40 ms a call otherwise

    def log_request(self, *_args: object) -> None:
        pass
