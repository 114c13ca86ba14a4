"""The strict layer before moto: one call at a time, every call written down, faults and lost replies put in."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.lab.aws import calls, faults
from tests.lab.aws.calls import Call

Answer = tuple[str, list[tuple[str, str]], list[bytes]]


class Front:
    """A WSGI application around another one. `own` may answer a call itself (None: moto does)."""

    def __init__(
        self,
        app: Callable[..., Iterable[bytes]],
        *,
        log: Path,
        rules: faults.Faults,
        lock: threading.RLock,
        own: Callable[[Call, bytes, dict[str, Any]], faults.Reply | None],
        done: Callable[[Call, bytes, bytes], None],
        around: Callable[[Call], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._app = app
        self._log = log
        self._rules = rules
        self._lock = lock  # moto is not thread-safe, and conditional writes must be decided one by one
        self._own = own
        self._done = done
        self._around = around
        self._writing = threading.Lock()
        self.calls: list[Call] = []
        self.delays: dict[str, float] = {}
        self.hears: Callable[[dict[str, Any], bytes], None] = lambda environ, body: None

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        body = _body(environ)
        self.hears(environ, body)
        call = calls.read(environ, body)
        time.sleep(self.delays.get(call.action, self.delays.get("*", 0.0)))
        fault = self._rules.of(call, body)
        if fault is not None and fault.when == "before":
            self._write(dataclasses.replace(call, status=fault.status, code=fault.code))
            reply = faults.error(call.service, fault.code, fault.message, fault.status)
            return _say(reply, environ, start_response)
        status, headers, chunks = self._answer(call, environ, body)
        if fault is not None:
            self._write(dataclasses.replace(call, status=0, code="lost"))
            _hang_up(environ)
        self._write(dataclasses.replace(call, status=int(status.split()[0])))
        start_response(status, headers)
        return chunks

    def _answer(self, call: Call, environ: dict[str, Any], body: bytes) -> Answer:
        with self._lock:
            own = self._own(call, body, environ)
            if own is not None:
                status, kind, said = own
                said = b"" if environ["REQUEST_METHOD"] == "HEAD" else said
                answer = (f"{status} -", _headers(kind, said), [said])
            else:
                with self._around(call):
                    answer = self._ask(environ)
            if int(answer[0].split()[0]) < 400:
                self._done(call, body, b"".join(answer[2]))
            return answer

    def _ask(self, environ: dict[str, Any]) -> Answer:
        seen: list[tuple[str, list[tuple[str, str]]]] = []

        def start(status: str, headers: list[tuple[str, str]], _exc: object = None) -> Callable[[bytes], None]:
            seen[:] = [(status, headers)]
            return lambda _data: None

        found = self._app(environ, start)
        chunks = list(found)
        close = getattr(found, "close", None)
        if close is not None:
            close()
        return seen[0][0], seen[0][1], chunks

    def _write(self, call: Call) -> None:
        with self._writing:
            self.calls.append(call)
            with self._log.open("a") as file:
                file.write(call.line() + "\n")


def _body(environ: dict[str, Any]) -> bytes:
    if environ.get("wsgi.input_terminated"):
        body = environ["wsgi.input"].read()
        environ["CONTENT_LENGTH"] = str(len(body))
        environ.pop("HTTP_TRANSFER_ENCODING", None)
    else:
        length = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(length)
        if len(body) < length:  # as AWS: a request that its sender did not finish is none
            raise ConnectionAbortedError(f"{len(body)} of {length} bytes came")
    environ["wsgi.input"] = io.BytesIO(body)
    return bytes(body)


def _headers(kind: str, said: bytes) -> list[tuple[str, str]]:
    return [("Content-Type", kind), ("Content-Length", str(len(said)))]


def _say(reply: faults.Reply, environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
    status, kind, said = reply
    said = b"" if environ["REQUEST_METHOD"] == "HEAD" else said
    start_response(f"{status} -", _headers(kind, said))
    return [said]


def _hang_up(environ: dict[str, Any]) -> None:
    """Close the connection without a word: to the caller the reply is lost."""
    connection: socket.socket = environ["werkzeug.socket"]
    connection.shutdown(socket.SHUT_RDWR)
    raise ConnectionAbortedError("the lab lost this reply")
