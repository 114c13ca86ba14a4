"""At which port the members of an attempt meet."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from gpucloud.domain.node.member import LOOK, FreePorts, candidates, common_port, parse_free

USUAL = range(32768, 61000)


def free(*ports: int, ephemeral: range = USUAL) -> FreePorts:
    return FreePorts(free=ports, ephemeral=ephemeral)


@pytest.mark.parametrize(
    ("nodes", "port"),
    [
        ([free(12001, 12002)], 12001),
        ([free(12001, 12002), free(12002)], 12002),
        ([free(12001, 12002), free(12001, 12002, ephemeral=range(12000, 12002))], 12002),
        ([free(12001, 12002, ephemeral=range(1024, 65536))], 12001),  # some hosts give out all
        ([free(12001), free(12002)], 12001),
        ([free(), free(12002)], None),
    ],
)
def test_the_port_is_free_on_all_nodes_and_none_that_connections_get_where_there_is_such(nodes, port):
    assert common_port(nodes) == port


def test_every_attempt_asks_for_other_ports_and_all_supervisors_of_it_for_the_same():
    asked = candidates("digits 1", ("a", "b"))
    assert asked == candidates("digits 1", ("a", "b"))
    assert set(asked).isdisjoint(candidates("digits 2", ("a", "b")))
    assert all(10_000 <= port < 32_000 for port in asked)


def test_jobs_of_one_name_in_two_fleets_of_one_machine_ask_for_other_ports():
    assert set(candidates("digits 1", ("a", "b"))).isdisjoint(candidates("digits 1", ("c", "d")))


def test_a_node_says_which_of_the_ports_are_free_and_which_it_gives_to_connections():
    asked = candidates("of this test", ())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", asked[0]))
        taken.listen()
        done = subprocess.run(
            [sys.executable, "-c", LOOK, *map(str, asked)], capture_output=True, text=True, check=True
        )
    found = parse_free(done.stdout, asked)
    assert found is not None
    assert asked[0] not in found.free
    assert len(found.free) > 6
    assert found.ephemeral.stop > found.ephemeral.start > 0


def test_nodes_of_one_machine_that_look_at_the_same_moment_take_no_port_from_each_other():
    asked = candidates("of nodes that share a machine", ())
    with socket.socket() as other:  # as another node's look has it for a moment
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("", asked[0]))
        done = subprocess.run(
            [sys.executable, "-c", LOOK, *map(str, asked)], capture_output=True, text=True, check=True
        )
    found = parse_free(done.stdout, asked)
    assert found is not None
    assert asked[0] in found.free
