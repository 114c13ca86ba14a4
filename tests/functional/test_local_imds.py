"""The embedded nodes' metadata service speaks as EC2's does."""

from __future__ import annotations

import http.client
import json
import selectors
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from gpucloud.adapters.local import ground
from gpucloud.adapters.local.ground import Instance, Metadata

NOW = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)
CALM = Instance(
    id="i-00000000000000001",
    instance_type="local.p3.2xlarge",
    region="us-east-2",
    zone="us-east-2a",
    spot=True,
    address="127.0.0.10",
    noticed_at=None,
    interrupted_at=None,
)
TAKEN = replace(CALM, noticed_at=NOW, interrupted_at=NOW + timedelta(seconds=120))
DATA = "/latest/meta-data/"
TTL = "X-aws-ec2-metadata-token-ttl-seconds"


class Service:
    def __init__(self, port: int) -> None:
        self.instance = CALM
        self._connection = http.client.HTTPConnection("127.0.0.1", port)

    def ask(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        self._connection.request(method, path, headers=headers)
        answer = self._connection.getresponse()
        return answer.status, answer.read().decode()

    def token(self, ttl: str = "60") -> str:
        status, token = self.ask("PUT", "/latest/api/token", {TTL: ttl})
        assert status == 200
        return token

    def get(self, path: str) -> tuple[int, str]:
        return self.ask("GET", path, {"X-aws-ec2-metadata-token": self.token()})

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def service() -> Iterator[Service]:
    found: list[Service] = []
    server = Metadata("127.0.0.1", lambda: found[0].instance)
    found.append(Service(server.server_port))
    stop = threading.Event()

    def serve() -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(server, selectors.EVENT_READ)
            while not stop.is_set():
                if selector.select(0.01):
                    server.handle_request()

    thread = threading.Thread(target=serve)
    thread.start()
    yield found[0]
    stop.set()
    thread.join()
    found[0].close()
    server.server_close()


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/latest/api/token", {TTL: "1"}, 200),
        ("/latest/api/token", {TTL: "21600"}, 200),
        ("/latest/api/token", {TTL: "21601"}, 400),
        ("/latest/api/token", {TTL: "0"}, 400),
        ("/latest/api/token", {TTL: "-1"}, 400),
        ("/latest/api/token", {TTL: "an hour"}, 400),
        ("/latest/api/token", {}, 400),
        ("/latest/api/token", {TTL: "60", "X-Forwarded-For": "203.0.113.1"}, 403),
        ("/latest/api/tokens", {TTL: "60"}, 404),
    ],
)
def test_a_token_is_given_by_ec2s_rules(service: Service, path: str, headers: dict[str, str], status: int) -> None:
    assert service.ask("PUT", path, headers)[0] == status


def test_nothing_is_told_without_a_valid_token(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    token = {"X-aws-ec2-metadata-token": service.token(ttl="60")}
    assert service.ask("GET", DATA + "instance-id", {})[0] == 401
    assert service.ask("GET", DATA + "instance-id", {"X-aws-ec2-metadata-token": "guess"})[0] == 401
    assert service.ask("GET", DATA + "instance-id", token) == (200, CALM.id)
    clock = ground.time.monotonic() + 61
    monkeypatch.setattr(ground.time, "monotonic", lambda: clock)
    assert service.ask("GET", DATA + "instance-id", token)[0] == 401


def test_a_node_learns_what_it_is(service: Service) -> None:
    told = {
        "instance-id": CALM.id,
        "instance-type": "local.p3.2xlarge",
        "instance-life-cycle": "spot",
        "placement/availability-zone": "us-east-2a",
        "placement/region": "us-east-2",
        "instance-action": "none",
        "placement/": "availability-zone\nregion",
        "placement": "availability-zone\nregion",
    }
    for path, value in told.items():
        assert service.get(DATA + path) == (200, value)
    status, text = service.get("/latest/dynamic/instance-identity/document")
    assert status == 200
    assert json.loads(text)["instanceId"] == CALM.id
    service.instance = replace(CALM, spot=False)
    assert service.get(DATA + "instance-life-cycle") == (200, "on-demand")


def test_events_are_not_found_until_they_are_there(service: Service) -> None:
    events = ("spot/instance-action", "spot/termination-time", "events/recommendations/rebalance", "spot")
    for path in events:
        assert service.get(DATA + path)[0] == 404
    service.instance = TAKEN
    for path in events:
        assert service.get(DATA + path)[0] == 200


def test_a_notice_has_the_form_and_the_time_that_were_posted(service: Service) -> None:
    service.instance = TAKEN
    status, text = service.get(DATA + "spot/instance-action")
    assert (status, json.loads(text)) == (200, {"action": "terminate", "time": "2026-03-01T12:02:00Z"})
    assert service.get(DATA + "spot/termination-time") == (200, "2026-03-01T12:02:00Z")
    assert json.loads(service.get(DATA + "events/recommendations/rebalance")[1]) == {
        "noticeTime": "2026-03-01T12:00:00Z"
    }
    assert service.get(DATA + "instance-action") == (200, "terminate")


@pytest.mark.parametrize("path", ["/", "/latest/meta-dataplacement", "/latest/meta-data/nothing", "/latest/user-data"])
def test_what_is_not_there_is_not_found(service: Service, path: str) -> None:
    assert service.get(path)[0] == 404
