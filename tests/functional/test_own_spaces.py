"""Nodes with namespaces of their own: power-off, a cut link, a partition, a full disk, the metadata's true address."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from gpucloud.adapters.local.node import MARK
from gpucloud.domain.errors import HostUnreachable
from gpucloud.domain.node.node import EndCause, Node
from gpucloud.system import processes
from tests.emulation import ROOT
from tests.running import words_of
from tests.standins.embedded import daemons, poll
from tests.standins.own_spaces import GROUP, Spaces, spaces

pytestmark = pytest.mark.allow_hosts(["127.0.0.0/8"])

# Writes on and on, so that what runs there can be seen from outside.
COUNTING = "nohup setsid sh -c 'n=0; while :; do n=$((n+1)); echo $n > count; sleep 0.02; done' >/dev/null 2>&1 &"
LISTEN = "nohup setsid {python} -I -S -m http.server 8000 --bind 0.0.0.0 >/dev/null 2>&1 &"
REACH = """
import socket, sys
try:
    socket.create_connection(("{address}", 8000), timeout={limit}).close()
except OSError as error:
    print("no")
else:
    print("yes")
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Spaces, Node, Node]]:
    with spaces(tmp_path_factory.mktemp("pair")) as two:
        one, other = two.size(2)
        for node in (one, other):
            two.says(node, "sh", "-c", LISTEN.format(python=sys.executable))
        poll(lambda: reaches(two, one, other))
        yield two, one, other


def reaches(two: Spaces, one: Node, other: Node, limit_s: float = 0.5) -> bool:
    return two.python(one, REACH.format(address=other.private_address, limit=limit_s)) == "yes"


def count(two: Spaces, node: Node) -> int:
    home = two.root / "cloud" / "groups" / GROUP / "nodes" / node.id / "home"
    text = (home / "count").read_text() if (home / "count").exists() else ""
    return int(text or 0)


def test_a_node_is_alone_with_its_processes_and_has_its_own_name_and_link(pair):
    two, one, other = pair
    assert two.says(one, "hostname") == f"ip-{one.private_address.replace('.', '-')}"
    numbers = two.python(one, "import os; print(*sorted(int(n) for n in os.listdir('/proc') if n.isdigit())[:2])")
    assert numbers == "1 2"
    assert two.python(one, "import socket; print(*sorted(n for _, n in socket.if_nameindex()))") == "eth0 lo"
    assert (one.interface, one.private_address, one.address) == ("eth0", "10.88.0.10", "127.0.0.10")
    assert reaches(two, one, other)
    assert two.says(one, "id", "-u") == str(os.getuid())


def test_the_metadata_service_is_at_its_true_address_without_a_variable(pair):
    two, one, _ = pair
    asked = (
        "import os, urllib.request as u; r = u.Request('http://169.254.169.254/latest/api/token', method='PUT',"
        " headers={'X-aws-ec2-metadata-token-ttl-seconds': '60'}); t = u.urlopen(r, timeout=5).read().decode();"
        "r = u.Request('http://169.254.169.254/latest/meta-data/local-ipv4', headers={'X-aws-ec2-metadata-token': t});"
        "print(u.urlopen(r, timeout=5).read().decode(), 'AWS_EC2_METADATA_SERVICE_ENDPOINT' in os.environ)"
    )
    assert two.python(one, asked) == f"{one.private_address} False"


def test_a_stranger_among_addresses_is_looked_up_without_waiting(pair):
    two, one, _ = pair
    asked = "import socket, time; t = time.monotonic(); print(socket.getfqdn('10.88.77.77'), time.monotonic() - t < 4)"
    assert two.python(one, asked) == "10.88.77.77 True"


def test_a_node_that_is_cut_off_goes_on_alone_until_it_is_healed(pair):
    two, one, other = pair
    two.says(one, "sh", "-c", COUNTING)
    poll(lambda: count(two, one) > 0)
    two.cloud.cut(GROUP, one.id)
    poll(lambda: not answers(two, one, 1))
    assert not reaches(two, other, one)
    seen = count(two, one)
    poll(lambda: count(two, one) > seen + 5)
    two.cloud.heal(GROUP, one.id)
    poll(lambda: answers(two, one))
    assert reaches(two, one, other, 5)


def test_a_node_that_is_frozen_does_nothing_until_it_is_healed(pair):
    two, _, other = pair
    two.says(other, "sh", "-c", COUNTING)
    poll(lambda: count(two, other) > 0)
    two.cloud.freeze(GROUP, other.id)
    poll(lambda: two.cloud.describe(GROUP).size == 2 and still(two, other))
    two.cloud.heal(GROUP, other.id)
    seen = count(two, other)
    poll(lambda: count(two, other) > seen)
    assert answers(two, other)


def test_nodes_on_two_sides_of_a_partition_do_not_meet_and_both_answer(pair):
    two, one, other = pair
    two.cloud.part(GROUP, one.id, 1)
    poll(lambda: not reaches(two, one, other))
    assert answers(two, other)
    two.cloud.part(GROUP, other.id, 1)
    poll(lambda: reaches(two, one, other))
    two.cloud.heal(GROUP, one.id)
    two.cloud.heal(GROUP, other.id)
    poll(lambda: reaches(two, one, other))


def answers(two: Spaces, node: Node, limit_s: float = 5) -> bool:
    try:
        return two.host(node).run(("true",), timeout_s=limit_s).exit_code == 0
    except HostUnreachable:
        return False


def still(two: Spaces, node: Node) -> bool:
    seen = count(two, node)
    time.sleep(0.2)
    return count(two, node) == seen


def test_a_node_that_powers_itself_off_is_gone_with_everything(tmp_path):
    with spaces(tmp_path) as one:
        (node,) = one.size(1)
        one.says(node, "sh", "-c", COUNTING)
        off = (sys.executable, "-m", "gpucloud.adapters.local.node")
        one.says(node, "sh", "-c", f"setsid sh -c 'sleep 0.2; {' '.join(off)}' >/dev/null 2>&1 &")
        poll(lambda: one.cloud.describe(GROUP).nodes[0].end_cause is EndCause.CRASH)
        assert not processes.marked(MARK, node.id)


def test_a_small_disk_is_full_when_it_is_full(tmp_path):
    with spaces(tmp_path, home_mib=2) as one:
        (node,) = one.size(1)
        done = one.host(node).run(("sh", "-c", "head -c 4000000 /dev/zero > big"))
        assert (done.exit_code != 0, b"No space left" in done.stderr) == (True, True)


def test_when_the_switch_dies_the_nodes_on_it_end_and_others_take_their_places(tmp_path):
    with spaces(tmp_path) as one:
        (node,) = one.size(1)
        (daemon,) = daemons(tmp_path / "cloud")
        os.kill(switch_of(daemon), signal.SIGKILL)
        poll(lambda: one.cloud.describe(GROUP).nodes[0].end_cause is EndCause.CRASH)
        (another,) = one.size(1)
        assert another.id != node.id
        assert answers(one, another)


def test_when_the_daemon_is_killed_nothing_of_its_nodes_and_network_is_left(tmp_path):
    with spaces(tmp_path) as one:
        (node,) = one.size(1)
        one.says(node, "sh", "-c", COUNTING)
        one.cloud.cut(GROUP, node.id)
        (daemon,) = daemons(tmp_path / "cloud")
        members = {*processes.descendants(daemon), switch_of(daemon)}
        os.kill(daemon, signal.SIGKILL)
        poll(lambda: not any(processes.started(pid) for pid in members), limit_s=5)


def switch_of(daemon: int) -> int:
    (found,) = (pid for pid in processes.descendants(daemon) if "tests.emulation.switch" in words_of(pid))
    return found


# Becomes an ordinary user: in a user namespace whose only user is number 1000, who has no rights there after exec.
ORDINARY = """
import os, sys
from tests.emulation import namespaces
namespaces.unshare_user(as_id=1000, group_id=1000)
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
"""
PROBE = "import os; from tests.emulation import rights; print(os.getuid(), rights.missing_right())"


def test_an_ordinary_user_may_have_them_where_the_kernel_allows_it():
    done = subprocess.run([sys.executable, "-c", ORDINARY, PROBE], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "1000 None", done.stdout + done.stderr
