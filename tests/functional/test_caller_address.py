"""SSH comes from the caller's own address, or from where the caller says."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest

from gpucloud.adapters.aws.standing import OurAddress, ssh_cidr
from gpucloud.domain.errors import ProvisionError, UsageError


@pytest.fixture
def says() -> Iterator[tuple[list[bytes], str]]:
    words = [b"203.0.113.7\n"]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(words[0])

        def log_message(self, *_args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield words, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(
    ("named", "cidr"), [("198.51.100.0/24", "198.51.100.0/24"), ("198.51.100.9", "198.51.100.9/32")]
)
def test_the_variable_goes_first(named: str, cidr: str) -> None:
    assert ssh_cidr({"GPUCLOUD_SSH_CIDR": named}, url="http://127.0.0.1:1") == cidr


@pytest.mark.parametrize("named", ["0.0.0.0/0", "203.0.0.0/7", "203.0.113.7/24", "here"])
def test_a_range_that_is_none_or_nearly_everything_is_refused(named: str) -> None:
    with pytest.raises(UsageError, match="GPUCLOUD_SSH_CIDR") as caught:
        ssh_cidr({"GPUCLOUD_SSH_CIDR": named})
    assert "203.0.113.7/32" in (caught.value.hint or "")


def test_else_it_is_the_address_that_the_internet_sees(says: tuple[list[bytes], str]) -> None:
    assert ssh_cidr({}, url=says[1]) == "203.0.113.7/32"


def test_an_answer_that_is_no_address_opens_nothing(says: tuple[list[bytes], str]) -> None:
    says[0][0] = b"<html>log in to the hotel's network</html>"
    with pytest.raises(ProvisionError, match="cannot learn this machine's public address"):
        ssh_cidr({}, url=says[1])


def test_without_an_answer_the_hint_is_the_variable() -> None:
    with pytest.raises(ProvisionError) as caught:
        ssh_cidr({}, url="http://127.0.0.1:1")
    assert (caught.value.hint or "").startswith("set GPUCLOUD_SSH_CIDR")


def test_an_address_that_is_another_by_now_is_told_once_it_can_be_asked(says: tuple[list[bytes], str]) -> None:
    words, url = says
    ours = OurAddress(lambda: ssh_cidr({}, url=url))
    words[0] = b"198.51.100.9"
    assert ours.moved_to() is None  # nothing was let in, as where machines are reached otherwise
    words[0] = b"203.0.113.7"
    assert (ours.ask(), ours.moved_to()) == ("203.0.113.7/32", None)
    words[0] = b"<html>log in to the hotel's network</html>"
    assert ours.moved_to() is None
    words[0] = b"198.51.100.9"
    assert ours.moved_to() == "198.51.100.9/32"
    assert (ours.ask(), ours.moved_to()) == ("198.51.100.9/32", None)
