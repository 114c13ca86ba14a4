"""Where the ranks of the embedded fleet meet, nobody from the network can come."""

from __future__ import annotations

import json
import socket
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from gpucloud.domain.node.output import port_was_taken
from gpucloud.probe.torchrun import store
from tests.commandline import command_line

SCRIPT = """
import json, os, pathlib
import torch, torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(3))


def listening():
    inodes = set()
    for pid in (os.getpid(), os.getppid()):
        for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(os.readlink(fd))
            except OSError:
                pass
    for family in ("tcp", "tcp6"):
        for row in pathlib.Path(f"/proc/net/{family}").read_text().splitlines()[1:]:
            words = row.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                yield family, words[1]


found = [None] * dist.get_world_size()
dist.all_gather_object(found, [dist.get_rank(), os.environ["MASTER_PORT"], list(listening())])
if dist.get_rank() == 0:
    for one in found:
        print("LISTENS", json.dumps(one), flush=True)
dist.destroy_process_group()
"""


def shown(address: str) -> tuple[str, int]:
    """Return address and port as people write them; the kernel writes four bytes in the machine's order."""
    digits, port = address.split(":")
    return socket.inet_ntoa(bytes.fromhex(digits)[::-1]), int(port, 16)


def test_what_listens_for_a_job_listens_on_the_nodes_own_address(tmp_path: Path) -> None:
    with command_line(tmp_path) as line:
        file = line.job("meeting", steps=1)
        (tmp_path / "code" / "train.py").write_text(SCRIPT)
        answer = line.run("train", file, "--json")
        assert answer.code == 0, answer.stderr
        said = [json.loads(row.partition("LISTENS ")[2]) for row in answer.stderr.splitlines() if "LISTENS " in row]
    assert sorted(rank for rank, _, _ in said) == [0, 1]
    assert [family for _, _, found in said for family, _ in found if family == "tcp6"] == []
    listening = {rank: [shown(address) for _, address in found] for rank, _, found in said}
    assert all(host.startswith("127.") for found in listening.values() for host, _ in found), listening
    assert int(said[0][1]) in {port for _, port in listening[0]}  # the store is among them


def test_a_store_on_another_loopback_address_is_not_there() -> None:
    with socket.socket() as free:
        free.bind(("127.77.0.1", 0))
        port = free.getsockname()[1]
    patience = timedelta(seconds=20)
    served = store("127.77.0.1", port, 1, True, patience)
    served.set("key", "value")
    assert store("127.77.0.1", port, 1, False, patience).get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.77.0.2", port), timeout=5)


def test_a_port_that_is_taken_is_torchs_own_kind_of_error() -> None:
    with socket.create_server(("127.77.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"cannot meet at 127.77.0.1:{port}") as ours:
            store("127.77.0.1", port, 1, True, timedelta(seconds=5))
    assert port_was_taken(str(ours.value))


def test_torchs_own_words_for_a_port_that_is_taken_are_known() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(RuntimeError) as torchs:
        TCPStore("127.0.0.1", taken.getsockname()[1], 1, True, timedelta(seconds=5))
    assert port_was_taken(str(torchs.value))
