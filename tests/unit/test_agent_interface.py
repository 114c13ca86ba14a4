from __future__ import annotations

import sys
from ipaddress import IPv4Address, IPv4Interface

import pytest

from gpucloud.agent.network import carrying, choose

MANY = (
    ("lo", IPv4Interface("127.0.0.1/8")),
    ("docker0", IPv4Interface("172.17.0.1/16")),
    ("ens5", IPv4Interface("172.17.32.5/20")),
    ("ens6", IPv4Interface("172.17.32.6/20")),
)


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("172.17.32.5", "ens5"),
        ("172.17.32.6", "ens6"),
        ("172.17.0.1", "docker0"),
        ("172.17.33.9", "ens5"),
        ("127.4.5.6", "lo"),
        ("10.0.0.1", None),
    ],
)
def test_the_interface_with_the_address_is_chosen_else_the_narrowest_network_that_holds_it(address, name):
    assert choose(IPv4Address(address), MANY) == name


def test_loopback_carries_every_address_of_its_network():
    assert carrying("127.0.9.9") == ("lo" if sys.platform.startswith("linux") else "lo0")


@pytest.mark.parametrize("address", ["node-1.internal", "::1", ""])
def test_what_is_no_ipv4_address_is_carried_by_none(address):
    assert carrying(address) is None
