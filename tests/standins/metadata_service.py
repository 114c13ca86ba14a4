"""An IMDSv2 that a test commands: tokens as EC2 checks them, a notice and a recommendation when told."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class MetadataService:
    """Listens on loopback while the `with` lasts; the two are bodies, None for 404."""

    def __init__(self):
        self.action: str | None = None
        self.rebalance: str | None = None
        self.tokens: set[str] = set()
        self.requests: list[str] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()

    def forget_tokens(self):
        self.tokens.clear()

    def _handler(self):
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_PUT(self):
                service.requests.append("PUT")
                token = f"token-{len(service.requests)}"
                service.tokens.add(token)
                self._answer(200, token)

            def do_GET(self):
                service.requests.append(self.path)
                if self.headers.get("X-aws-ec2-metadata-token") not in service.tokens:
                    self._answer(401, "")
                elif self.path == "/latest/meta-data/spot/instance-action" and service.action:
                    self._answer(200, service.action)
                elif self.path == "/latest/meta-data/events/recommendations/rebalance" and service.rebalance:
                    self._answer(200, service.rebalance)
                else:
                    self._answer(404, "")

            def _answer(self, code, body):
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_):
                pass

        return Handler
