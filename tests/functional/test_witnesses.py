"""Second witnesses of machines that do not answer: real knocks at real SSH servers, and what becomes of them."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest

from gpucloud.agent.__main__ import main
from gpucloud.agent.network import probe
from gpucloud.domain.errors import HostUnreachable
from gpucloud.domain.node.node import PeerReport
from gpucloud.domain.supervision.snapshot import Limits, Rules
from gpucloud.ports import Completed
from gpucloud.usecases.supervise.look import PeerReports
from tests.fakes.nodes import embedded_server
from tests.unit.worlds import NOW, opened, part, snapshot, state, up


@contextmanager
def listening(answer: bytes, *, close=False):
    """A port that accepts, says `answer`, and then hangs on or up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        held = []

        def serve():
            with_peer, _ = listener.accept()
            with_peer.sendall(answer)
            with_peer.close() if close else held.append(with_peer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()
        for connection in held:
            connection.close()


def test_an_ssh_server_that_greets_is_alive_and_a_stopped_one_is_dead_though_it_accepts(tmp_path):
    with embedded_server(tmp_path) as server:
        port = server.node.port
        assert probe("127.0.0.1", port, limit_s=10.0) is PeerReport.ALIVE
        os.kill(server.process.pid, signal.SIGSTOP)
        assert probe("127.0.0.1", port, limit_s=0.3) is PeerReport.DEAD
        os.kill(server.process.pid, signal.SIGCONT)
        assert probe("127.0.0.1", port, limit_s=10.0) is PeerReport.ALIVE
    assert probe("127.0.0.1", port, limit_s=2.0) is PeerReport.DEAD  # refused


@pytest.mark.parametrize(
    ("answer", "close", "word"),
    [
        (b"SSH-2.0-x\r\n", False, PeerReport.ALIVE),
        (b"Welcome, stranger\r\nSSH-2.0-x\r\n", False, PeerReport.ALIVE),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", True, PeerReport.DEAD),
        (b"", True, PeerReport.DEAD),
    ],
)
def test_only_an_ssh_greeting_is_a_sign_of_life(answer, close, word):
    with listening(answer, close=close) as port:
        assert probe("127.0.0.1", port, limit_s=5.0) is word


@pytest.mark.parametrize(
    ("fault", "word"),
    [
        (OSError(errno.EHOSTUNREACH, "no route to host"), PeerReport.DEAD),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), PeerReport.DEAD),
        (TimeoutError("timed out"), PeerReport.DEAD),
        (OSError(errno.ENETUNREACH, "the peer has no network"), PeerReport.NOTHING),
        (OSError(errno.EACCES, "its own firewall"), PeerReport.NOTHING),
        (socket.gaierror(socket.EAI_NONAME, "its resolver"), PeerReport.NOTHING),
    ],
)
def test_a_fault_of_the_peer_itself_is_no_word(fault, word, monkeypatch):
    def fail(*_arguments, **_options):
        raise fault

    monkeypatch.setattr(socket, "create_connection", fail)
    assert probe("10.0.0.5", 22, limit_s=1.0) is word


def test_the_nodes_command_says_its_word_in_one_line(capsys):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert main(["probe", "127.0.0.1", str(bound.getsockname()[1]), "--limit", "1"]) == 0
    assert capsys.readouterr().out == "dead\n"


class Peers:
    """Hosts that answer a knock as they are told, and say who was asked at what."""

    def __init__(self):
        self.words = {}
        self.asked = []

    def host(self, node):
        if node.id not in self.words:
            raise HostUnreachable(f"{node.id} is away")
        return SimpleNamespace(run=lambda argv, timeout_s: self.run(node.id, argv))

    def run(self, peer, argv):
        self.asked.append((peer, argv[-2:]))
        return Completed(exit_code=0, stdout=self.words[peer].encode() + b"\n", stderr=b"")


class Prompt(ThreadPoolExecutor):
    """What is submitted is done when `submit` returns."""

    def submit(self, work, *arguments):
        done = super().submit(work, *arguments)
        done.exception()
        return done


@pytest.fixture
def peers():
    return Peers()


@pytest.fixture
def peer_reports(peers):
    world = SimpleNamespace(shell=peers, rules=Rules(limits=Limits(silent=timedelta(seconds=3))))
    made = SimpleNamespace(base_python=sys.executable, package_path="/g.zip", root="/r")
    with Prompt(1) as pool:
        yield PeerReports(services=world, bootstrapper=SimpleNamespace(made_of=lambda _: made), pool=pool)


def words(heard):
    return {
        node.node.id: (node.peer_report, node.reporter)
        for node in heard.nodes
        if node.peer_report is not PeerReport.NOTHING
    }


def test_a_peer_is_asked_a_third_of_the_time_ahead_and_its_word_is_there_at_the_next_look(peer_reports, peers):
    peers.words = {"a": "dead"}
    assert words(peer_reports.hear(snapshot(up("a"), up("b", silent=0.9)))) == {}
    assert peers.asked == []
    assert words(peer_reports.hear(snapshot(up("a"), up("b", silent=1.0)))) == {}
    assert peers.asked == [("a", ("127.0.0.10", "2222"))]
    assert words(peer_reports.hear(snapshot(up("a"), up("b", silent=3.0)))) == {"b": (PeerReport.DEAD, "a")}


def test_a_machine_that_answered_in_between_is_asked_about_anew(peer_reports, peers):
    peers.words = {"a": "dead"}
    for silence in (1.0, 1.5, 0.0, 1.0):
        heard = peer_reports.hear(snapshot(up("a"), up("b", silent=silence)))
    assert words(heard) == {}


def test_peers_are_asked_in_turn_and_one_that_is_away_says_nothing(peer_reports, peers):
    peers.words = {"c": "alive"}
    heard = [words(peer_reports.hear(snapshot(up("a"), up("b", silent=2.0 + i), up("c")))) for i in range(3)]
    assert heard == [{}, {}, {"b": (PeerReport.ALIVE, "c")}]


def test_nobody_is_asked_when_nobody_answers(peer_reports, peers):
    assert words(peer_reports.hear(snapshot(up("a", silent=9), up("b", silent=9)))) == {}
    assert peers.asked == []


def stepping(step, silence, at, *, number=1):
    nodes = (up("a", part(number, step=step)), up("b", part(number, step=1), silent=silence))
    changes = {"state": state(attempts=(opened("a", "b", number=number),))}
    return replace(snapshot(*nodes, **changes), now=NOW + timedelta(seconds=at))


def test_steps_that_go_on_vouch_for_every_member_whatever_a_peer_says(peer_reports, peers):
    peers.words = {"a": "dead"}
    for at, step in ((0, 10), (1, 11), (2, 12), (3, 13), (4, 14)):
        heard = peer_reports.hear(stepping(step, at, at))
    assert words(heard) == {"b": (PeerReport.ALIVE, "the training, whose steps go on,")}


def test_a_step_that_was_under_way_when_a_machine_went_silent_vouches_for_nobody(peer_reports, peers):
    peers.words = {"a": "dead"}
    for at, step in ((0, 10), (1, 11), (3, 12), (4, 12), (9, 12)):
        heard = peer_reports.hear(stepping(step, at, at))
    assert words(heard) == {"b": (PeerReport.DEAD, "a")}


def test_the_steps_of_an_earlier_attempt_say_nothing(peer_reports, peers):
    peers.words = {"a": "dead"}
    for at, step in ((0, 10), (1, 11), (2, 12), (3, 13)):
        peer_reports.hear(stepping(step, at, at))
    assert words(peer_reports.hear(stepping(1, 5, 5, number=2))) == {"b": (PeerReport.DEAD, "a")}
