"""S3 in memory over bare sockets, as fast as memory is, with the faults that a part can meet on its way.

One thread a connection, and one system call for a whole body where the kernel has it: moto would be the bottleneck of
every measurement. It knows what large objects need (PUT, parts, HEAD, ranged GET), checks no signature, and checks
CRC32s that it is sent. `python -m tests.standins.fast_bucket` serves until its input ends; it says its port first.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import itertools
import os
import re
import socket
import ssl
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from urllib.parse import parse_qsl, unquote

from tests.standins.bucket import ENVIRONMENT

Buffers = list[bytearray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request without its body."""

    method: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]

    @property
    def action(self) -> str:
        """S3's name for it."""
        if self.method == "PUT":
            return "UploadPart" if "uploadId" in self.query else "PutObject"
        if self.method == "POST":
            return "CompleteMultipartUpload" if "uploadId" in self.query else "CreateMultipartUpload"
        if self.method == "DELETE":
            return "AbortMultipartUpload" if "uploadId" in self.query else "DeleteObject"
        names = {"GET": "GetObject", "HEAD": "HeadObject"}
        return names[self.method] if self.key.partition("/")[2] else "ListObjects"

    @property
    def signed_in_url(self) -> bool:
        """Whether it has a signature in its URL."""
        return "X-Amz-Signature" in self.query


@dataclass(slots=True, kw_only=True)
class Fault:
    """What befalls the next `times` requests of an action, after `skip` of them.

    `refused`: answered with status and code; `early`: so, before the body is read. `reset`: the connection breaks in
    the middle of the body. `cut`: half of the answer's body comes. `lost`: done, and no answer comes.
    """

    action: str
    how: str
    status: int = 503
    code: str = "SlowDown"
    times: int = 1
    skip: int = 0


@dataclass(slots=True)
class Stored:
    """An object, as the buffers that it came in."""

    buffers: Buffers
    etag: str
    crc32: str | None = None

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(map(len, self.buffers))


@dataclass(slots=True)
class FastBucket:
    """The server. `requests` are all that came."""

    tls: ssl.SSLContext | None = None
    requests: list[Request] = field(default_factory=list)
    objects: dict[str, Stored] = field(default_factory=dict)
    uploads: dict[str, dict[int, Stored]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    refuse: Callable[[Request], bool] = lambda request: False
    etags_are_md5: bool = True
    knows_ranges: bool = True
    checks_sums: bool = True
    connections: int = 0
    port: int = 0
    _free: dict[int, Buffers] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _listener: socket.socket | None = None
    _ends: list[socket.socket] = field(default_factory=list)

    def start(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        return {**ENVIRONMENT, "AWS_ENDPOINT_URL": f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"}

    def data(self, key: str) -> bytes:
        return b"".join(self.objects[key].buffers)

    def actions(self) -> list[str]:
        return [request.action for request in self.requests]

    def reset(self) -> None:
        """Forget everything but the connections."""
        for kept in (self.requests, self.objects, self.uploads, self.faults):
            kept.clear()
        self.refuse, self.etags_are_md5, self.knows_ranges, self.connections = lambda request: False, True, True, 0

    def hang_up(self) -> None:
        """Close every connection."""
        while self._ends:
            with contextlib.suppress(OSError):
                self._ends.pop().shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        assert self._listener is not None
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        self.hang_up()

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            try:
                end, _ = self._listener.accept()
                self.connections += 1
                self._ends.append(end)
            except OSError:
                return
            threading.Thread(target=self._serve, args=(end,), daemon=True).start()

    def _serve(self, end: socket.socket) -> None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError, EOFError), contextlib.ExitStack() as closing:
            closing.callback(end.close)
            if self.tls is not None:
                end = closing.enter_context(self.tls.wrap_socket(end, server_side=True))
            while self._answer(_Line(end)):
                pass

    def _answer(self, line: _Line) -> bool:
        request = line.request()
        if request is None:
            return False
        with self._lock:
            self.requests.append(request)
            fault = self._fault(request)
        if fault is not None and fault.how == "early":
            line.say(fault.status, _error(fault.code), close=True)
            return False
        if fault is not None and fault.how == "reset":
            line.break_in_the_middle(request)
            return False
        body = line.body(request, self._buffer)
        if fault is not None and fault.how == "refused":
            line.say(fault.status, _error(fault.code))
            return True
        if self.refuse(request):
            line.say(403, _error("AccessDenied"))
            return True
        if fault is not None and fault.how == "lost":
            line = _Mute(line.end)
        line.half = fault is not None and fault.how == "cut"
        self._act(line, request, body)
        return not (line.half or isinstance(line, _Mute))

    def _fault(self, request: Request) -> Fault | None:
        for fault in self.faults:
            if fault.action != request.action or fault.times == 0:
                continue
            if fault.skip:
                fault.skip -= 1
                continue
            fault.times -= 1
            return fault
        return None

    def _act(self, line: _Line, request: Request, body: bytearray) -> None:
        match request.action:
            case "PutObject" | "UploadPart":
                self._put(line, request, body)
            case "CreateMultipartUpload":
                upload = f"upload-{next(self._numbers)}"
                self.uploads[upload] = {}
                line.say(
                    200, f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
                )
            case "CompleteMultipartUpload":
                self._complete(line, request, body)
            case "AbortMultipartUpload":
                self._free_up(*self.uploads.pop(request.query["uploadId"], {}).values())
                line.say(204, "")
            case "GetObject" | "HeadObject":
                self._give(line, request)
            case "DeleteObject":
                self.objects.pop(request.key, None)
                line.say(204, "")
            case _:
                line.say(200, "<ListBucketResult><KeyCount>0</KeyCount></ListBucketResult>")

    def _put(self, line: _Line, request: Request, body: bytearray) -> None:
        said = request.headers.get("x-amz-checksum-crc32")
        if self.checks_sums and said is not None and said != _base64(zlib.crc32(body)):
            return line.say(400, _error("BadDigest"))
        etag = hashlib.md5(body).hexdigest() if self.etags_are_md5 else f"{next(self._numbers):032x}"
        stored = Stored([body], f'"{etag}"', said)
        if request.action == "PutObject":
            self._store(request.key, stored)
        elif request.query["uploadId"] not in self.uploads:
            return line.say(404, _error("NoSuchUpload"))
        else:
            parts = self.uploads[request.query["uploadId"]]
            number = int(request.query["partNumber"])
            self._free_up(*filter(None, [parts.pop(number, None)]))
            parts[number] = stored
        return line.say(200, "", ETag=stored.etag)

    def _complete(self, line: _Line, request: Request, body: bytearray) -> None:
        parts = self.uploads.get(request.query["uploadId"])
        if parts is None:
            return line.say(404, _error("NoSuchUpload"))
        told = re.findall(rb"<PartNumber>(\d+)</PartNumber>", body)
        if sorted(parts) != [int(number) for number in told]:
            return line.say(400, _error("InvalidPart"))
        ordered = [parts[number] for number in sorted(parts)]
        etag = hashlib.md5(b"".join(bytes.fromhex(part.etag.strip('"')) for part in ordered)).hexdigest()
        if not self.etags_are_md5:
            etag = f"{next(self._numbers):032x}"
        sums = [base64.b64decode(part.crc32) for part in ordered if part.crc32]
        crc32 = f"{_base64(zlib.crc32(b''.join(sums)))}-{len(ordered)}" if sums else None
        whole = Stored([part.buffers[0] for part in ordered], f'"{etag}-{len(ordered)}"', crc32)
        self._store(request.key, whole)
        del self.uploads[request.query["uploadId"]]
        return line.say(
            200,
            f"<CompleteMultipartUploadResult><ETag>{whole.etag}</ETag></CompleteMultipartUploadResult>",
        )

    def _give(self, line: _Line, request: Request) -> None:
        stored = self.objects.get(request.key)
        if stored is None:
            return line.say(404, _error("NoSuchKey"))
        more = {"ETag": stored.etag, "Accept-Ranges": "bytes", "Last-Modified": formatdate(usegmt=True)}
        if stored.crc32 and request.headers.get("x-amz-checksum-mode") == "ENABLED" and request.method == "HEAD":
            more["x-amz-checksum-crc32"] = stored.crc32
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", ""))
        first, last = 0, stored.size - 1
        if asked and self.knows_ranges:
            first, last = int(asked[1]), min(int(asked[2] or last), last)
            if first > last:
                return line.say(416, _error("InvalidRange"))
            more["Content-Range"] = f"bytes {first}-{last}/{stored.size}"
        views = _cut(stored.buffers, first, last + 1)
        return line.give(
            206 if "Content-Range" in more else 200, views, last + 1 - first, more, head=request.method == "HEAD"
        )

    def _store(self, key: str, stored: Stored) -> None:
        with self._lock:
            before = self.objects.pop(key, None)
            self.objects[key] = stored
        if before is not None:
            self._free_up(before)

    def _buffer(self, size: int) -> bytearray:
        """Memory that was used before, where there is some: fresh pages would cost more than the copy."""
        with self._lock:
            free = self._free.get(size)
            return free.pop() if free else bytearray(size)

    def _free_up(self, *gone: Stored) -> None:
        with self._lock:
            for stored in gone:
                for buffer in stored.buffers:
                    self._free.setdefault(len(buffer), []).append(buffer)


class _Line:
    """One connection."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.half = False

    def request(self) -> Request | None:
        head = b""
        while b"\r\n\r\n" not in head:
            if isinstance(self.end, ssl.SSLSocket):
                found = self.end.recv(1)
            else:  # not a byte of the body: that goes where it stays
                seen = self.end.recv(65536, socket.MSG_PEEK)
                stop = (head + seen).find(b"\r\n\r\n")
                found = self.end.recv(len(seen) if stop < 0 else stop + 4 - len(head))
            if not found:
                return None
            head += found
        first, *rest = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ")
        path, _, query = re.sub("^http://[^/]*", "", target).partition("?")  # the whole URL, where this is a proxy
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in rest if line)}
        if headers.get("expect") == "100-continue":
            self.end.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        asked = dict(parse_qsl(query, keep_blank_values=True))
        return Request(method=method, key=unquote(path).lstrip("/"), query=asked, headers=headers)

    def body(self, request: Request, buffer: Callable[[int], bytearray]) -> bytearray:
        if "aws-chunked" in request.headers.get("content-encoding", "") or "transfer-encoding" in request.headers:
            return self._chunks(request, buffer)
        data = buffer(int(request.headers.get("content-length", 0)))
        self._fill(memoryview(data))
        return data

    def break_in_the_middle(self, request: Request) -> None:
        self._fill(memoryview(bytearray(int(request.headers.get("content-length", 0)) // 2)))
        self.end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def say(self, status: int, text: str, *, close: bool = False, **more: str) -> None:
        body = text.encode()
        told = {"Content-Type": "application/xml", **more, **({"Connection": "close"} if close else {})}
        self.give(status, [memoryview(body)], len(body), told, head=status == 204)

    def give(self, status: int, views: list[memoryview], size: int, more: dict[str, str], *, head: bool) -> None:
        lines = [f"HTTP/1.1 {status} X", f"Content-Length: {size}", f"Date: {formatdate(usegmt=True)}"]
        lines += [f"{name}: {value}" for name, value in more.items()]
        self.end.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        for view in () if head else views:
            self.end.sendall(view[: len(view) // 2] if self.half else view)

    def _chunks(self, request: Request, buffer: Callable[[int], bytearray]) -> bytearray:
        wrapped = "transfer-encoding" in request.headers and "aws-chunked" in request.headers.get(
            "content-encoding", ""
        )
        with self.end.makefile("rb", buffering=1 << 20) as raw:
            if wrapped:
                text = b"".join(_chunks(raw))
                return bytearray(b"".join(_chunks(io.BytesIO(text))))
            data = buffer(int(request.headers.get("x-amz-decoded-content-length", 0)))
            at = 0
            for chunk in _chunks(raw):
                data[at : at + len(chunk)] = chunk
                at += len(chunk)
        return data

    def _fill(self, into: memoryview) -> None:
        while into:
            if isinstance(self.end, ssl.SSLSocket):
                count = self.end.recv_into(into)
            else:
                count = self.end.recv_into(into, len(into), socket.MSG_WAITALL)
            if count == 0:
                raise EOFError
            into = into[count:]


class _Mute(_Line):
    """Breaks instead of answering."""

    def give(self, *_: object, **__: object) -> None:
        self.end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _chunks(raw: object) -> Iterator[bytes]:
    while True:
        size = int(raw.readline().split(b";")[0], 16)
        if size == 0:
            while raw.readline() not in (b"\r\n", b""):
                pass
            return
        yield raw.read(size)
        raw.readline()


def _cut(buffers: Buffers, first: int, stop: int) -> list[memoryview]:
    views, start = [], 0
    for buffer in buffers:
        low, high = max(first - start, 0), min(stop - start, len(buffer))
        if low < high:
            views.append(memoryview(buffer)[low:high])
        start += len(buffer)
    return views


def _error(code: str) -> str:
    return f"<Error><Code>{code}</Code><Message>put in by the test</Message></Error>"


def _base64(crc32: int) -> str:
    return base64.b64encode(crc32.to_bytes(4, "big")).decode()


@contextmanager
def serving(tls: ssl.SSLContext | None = None) -> Iterator[FastBucket]:
    server = FastBucket(tls)
    server.start()
    try:
        yield server
    finally:
        server.close()


@contextmanager
def in_a_process() -> Iterator[dict[str, str]]:
    """Serve from a process of its own, and yield the environment in which other processes find it."""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "tests.standins.fast_bucket"]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        yield {**os.environ, **ENVIRONMENT, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "PYTHONPATH": str(root)}
        assert server.stdin is not None
        server.stdin.close()


if __name__ == "__main__":
    standing = FastBucket(etags_are_md5=False, checks_sums=False)
    standing.start()
    print(standing.port, flush=True)
    sys.stdin.read()
