"""An S3 server on loopback (moto's) that counts what is read, and can hold a reader up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.request import Request, urlopen

import boto3
from moto.core.models import DEFAULT_ACCOUNT_ID as ACCOUNT
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.models import s3_backends
from werkzeug.serving import make_server

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": "/nonexistent",
    "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class Server:
    """`reads` are the objects (`bucket/key`) of every GET, with the range asked for; `hold_after` reads wait."""

    def __init__(self) -> None:
        self.reads: list[tuple[str, str | None]] = []
        self.hold_after: int | None = None
        self.refuse: Callable[[str], bool] = lambda path: False
        self.released = threading.Event()
        self._lock = threading.Lock()
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        # moto keeps its buckets for the whole process: nothing of an earlier test may be in them.
        with urlopen(Request(f"{self.environment['AWS_ENDPOINT_URL']}/moto-api/reset", method="POST"), timeout=10):
            pass

    @property
    def environment(self) -> dict[str, str]:
        return {**ENVIRONMENT, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.server_port}"}

    def client(self) -> Any:
        return boto3.session.Session(
            aws_access_key_id="test", aws_secret_access_key="test", region_name="us-east-1"
        ).client("s3", endpoint_url=self.environment["AWS_ENDPOINT_URL"])

    def put(self, files: dict[str, bytes], bucket: str = "sets") -> None:
        """Have a bucket with these objects, without asking for each: that would compute longer than a test does."""
        kept = s3_backends[ACCOUNT]["aws"]
        if bucket not in kept.buckets:
            kept.create_bucket(bucket, "us-east-1")
        for key, data in files.items():
            kept.put_object(bucket, key, data)

    def held(self) -> bool:
        """Whether as many reads have come as are answered."""
        return self.hold_after is not None and len(self.reads) > self.hold_after

    def release(self) -> None:
        self.hold_after = None
        self.released.set()

    def close(self) -> None:
        self.release()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Any:
        path = environ["PATH_INFO"].strip("/")
        if environ["REQUEST_METHOD"] == "GET" and "/" in path:
            if self.refuse(path):
                start_response("403 Forbidden", [("Content-Type", "application/xml")])
                return [b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"]
            with self._lock:
                self.reads.append((path, environ.get("HTTP_RANGE")))
                must_wait = self.held()
            if must_wait:
                self.released.wait(60)
        return self._app(environ, start_response)


@contextmanager
def serving() -> Iterator[Server]:
    server = Server()
    try:
        yield server
    finally:
        server.close()
