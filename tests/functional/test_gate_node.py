"""The gate on a node: real processes, the real torch on the CPU over gloo; nvidia-smi is a stand-in that prints a
genuine recording."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpucloud.agent.facts import gate_fact
from gpucloud.agent.gate.check import free_port, reach, take_part, try_out, work, write_mbps
from gpucloud.agent.gate.look import look
from gpucloud.domain.codec import from_json, to_json
from gpucloud.domain.node.gate.gang import GangFacts, GangOrder, blame
from gpucloud.domain.node.gate.report import MACHINE, Checked, GateOrder, GateWanted, ProbeOrder
from gpucloud.probe.device import is_repeatable, memory_keeps, probe, product_is_right

ROOT = Path(__file__).parent.parent.parent
DATA = ROOT / "tests" / "data" / "nvidia_smi"
CPU = torch.device("cpu")
NO_CUDA = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A stand-in nvidia-smi that prints the recording of four H200; NVLink's ports it does not know."""
    folder = tmp_path / "stand-in"
    folder.mkdir()
    program = folder / "nvidia-smi"
    program.write_text(
        f'#!/bin/sh\ncase "$1" in topo) cat {DATA}/h200x4.topo.txt;; nvlink) exit 3;; *) cat {DATA}/h200x4.xml;; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return program


def gate(root, order):
    """Run the node's command as a node does; return its exit code and answer."""
    argv = [sys.executable, "-m", "gpucloud.agent", "gate", "--root", str(root)]
    done = subprocess.run(argv, input=to_json(order), cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.stdout, done.stderr
    return done.returncode, from_json(Checked, done.stdout.strip().splitlines()[-1])


def order(digest="d", **changes):
    plain = {"gpus": 4, "models": ("H200",), "full": False, "torch": False}
    return GateOrder(wanted=GateWanted(**{**plain, **changes}), digest=digest, python=sys.executable)


def test_a_stand_in_of_four_good_gpus_passes_and_is_remembered_for_this_boot(tmp_path, stand_in):
    code, checked = gate(tmp_path / "root", order(full=True))
    assert (code, [one.code for one in checked.findings if one.severity.value == "fail"]) == (0, [])
    assert len(checked.report.gpus) == 4
    assert checked.report.links.pairs[0] == (0, 1, "NV18")
    record = json.loads((tmp_path / "root" / "gate.json").read_text())
    assert record["digest"] == "d"
    argv = [sys.executable, "-m", "gpucloud.agent", "facts", "--root", str(tmp_path / "root")]
    facts = json.loads(subprocess.run(argv, input="", cwd=ROOT, capture_output=True, text=True).stdout)
    assert (facts["gate"]["digest"], dict(facts["gate"]["figures"]).keys()) == ("d", {"disk", "took"})
    (tmp_path / "root" / "gate.json").write_text(json.dumps({**record, "boot_id": "an earlier boot"}))
    assert json.loads(subprocess.run(argv, input="", cwd=ROOT, capture_output=True, text=True).stdout)["gate"] is None


def test_a_torch_that_cannot_be_imported_is_an_answer_of_the_probe(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: no such file')")
    argv, env = [sys.executable, "-m", "gpucloud.probe"], {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(argv, input="{}", env=env, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["torch"]["error"] == "ImportError: libcudart.so.12: no such file"


def test_what_the_kernel_tells_of_a_device_after_a_check_makes_a_new_one(tmp_path, stand_in, monkeypatch):
    gate(tmp_path, order(full=True))
    newest = "gpucloud.agent.facts.newest_event"
    monkeypatch.setattr(newest, lambda: None)
    assert gate_fact(tmp_path).newest is None
    monkeypatch.setattr(newest, lambda: 12.5)
    assert gate_fact(tmp_path) is None
    record = json.loads((tmp_path / "gate.json").read_text())
    (tmp_path / "gate.json").write_text(json.dumps({**record, "newest": 12.5}))
    assert gate_fact(tmp_path).newest == 12.5


def test_a_gpu_that_somebody_holds_is_looked_at_again_before_it_is_refused(tmp_path, stand_in, monkeypatch):
    monkeypatch.setattr("gpucloud.agent.gate.look._LOOK_S", 0.01)
    looks = tmp_path / "looks"
    stand_in.write_text(
        f'#!/bin/sh\ncase "$1" in topo|nvlink) exit 3;; esac\necho >>{looks}\n'
        f"[ $(wc -l <{looks}) -gt 2 ] && exec cat {DATA}/h100x1-idle.xml\n"
        f"sed 's/>1267 MiB/>71267 MiB/' {DATA}/h100x1-busy.xml\n"
    )
    observed = look(order(gpus=1))
    assert (len(looks.read_text().splitlines()), observed.holders) == (3, ())
    looks.unlink()
    monkeypatch.setattr("gpucloud.agent.gate.look._RELEASES_WITHIN_S", 0.0)
    assert [(one.pid, one.name, one.computes) for one in look(order(gpus=1)).holders] == [(470, "python3", True)]
    looks.unlink()
    look(order(gpus=1), busy=True)
    assert len(looks.read_text().splitlines()) == 1


def test_a_quick_look_before_an_attempt_takes_no_time_and_leaves_no_record(tmp_path, stand_in):
    code, checked = gate(tmp_path, order(digest=""))
    assert (code, checked.report.seconds < 2) == (0, True)
    assert not (tmp_path / "gate.json").exists()


def test_a_gpu_hidden_from_a_stand_in_machine_is_refused(tmp_path, stand_in, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    code, checked = gate(tmp_path, order())
    assert code == 14
    assert str(checked.findings[0]).startswith("3 GPUs, 4 expected: 4 are there, CUDA_VISIBLE_DEVICES hides the others")
    assert not (tmp_path / "gate.json").exists()


def test_only_the_nodes_own_gpus_of_a_stand_in_machine_count(stand_in):
    observed = look(replace(order(), devices=("2", "3")))
    assert ([gpu.index for gpu in observed.gpus], observed.listed) == ([2, 3], 4)


def test_a_torch_for_cpus_on_a_stand_in_machine_is_refused_and_not_run_on_silently(tmp_path, stand_in):
    code, checked = gate(tmp_path, order(full=True, torch=True, gpus=1))
    assert code == 14
    assert [one.code for one in checked.findings if one.severity.value == "fail"] == ["cpu-torch"]
    assert checked.report.probes == ()


def test_this_machine_without_gpus_is_refused_by_a_job_that_pays_for_one(tmp_path):
    code, checked = gate(tmp_path, order(gpus=1, models=("H100",)))
    assert (code, checked.findings[0].text) == (14, "0 GPUs, 1 expected")


def test_a_python_without_torch_says_so(tmp_path, stand_in):
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    (tmp_path / "python").chmod(0o755)
    asked = GateOrder(wanted=GateWanted(gpus=1), digest="", python=str(tmp_path / "python"))
    observed = try_out(asked, look(asked))
    assert observed.torch.version is None
    assert observed.torch.error == "ModuleNotFoundError: No module named 'torch'"


def test_two_ranks_on_the_cpu_compute_and_add_up_right(monkeypatch):
    monkeypatch.setattr("gpucloud.agent.gate.check._MEGABYTES", 8)
    asked = GateOrder(wanted=GateWanted(gpus=2), digest="", python=sys.executable)
    observed = try_out(asked, look(asked), device="cpu")
    assert [(one.index, one.right, one.repeatable, one.memory_right, one.error) for one in observed.probes] == [
        (0, True, True, True, None),
        (1, True, True, True, None),
    ]
    assert (observed.collective.backend, observed.collective.ranks, observed.collective.right) == ("gloo", 2, True)
    assert observed.collective.busbw_gbps > 0


def test_a_product_that_comes_out_wrong_is_noticed():
    def wrong(a, b):
        product = torch.matmul(a, b)
        product[3, 5] += 1
        return product

    assert product_is_right(CPU, 128, torch.matmul)[0] is True
    assert product_is_right(CPU, 128, wrong)[0] is False
    assert probe(CPU, 0, wrong).right is False


def test_a_product_that_differs_the_second_time_is_noticed():
    calls = []

    def moody(a, b):
        calls.append(1)
        return torch.matmul(a, b) + len(calls) * 1e-3

    assert is_repeatable(CPU, 64, torch.float32, torch.matmul) is True
    assert is_repeatable(CPU, 64, torch.float32, moody) is False


def test_memory_is_written_and_read_back():
    assert memory_keeps(CPU, 1 << 20) == (True, (1 << 20) / 1e9)


_WRONG_SUM = """
import sys, torch, torch.distributed as dist
from gpucloud.domain.codec import from_json
from gpucloud.domain.node.gate.report import ProbeOrder
from gpucloud.probe import device
order = from_json(ProbeOrder, sys.argv[1])
device.join(order, torch.device("cpu"))
def reduce(message):
    dist.all_reduce(message)
    if order.rank == 1:
        message[7] += 1
print(device.sum_is_right(torch.device("cpu"), order, reduce), flush=True)
"""


def test_a_sum_that_one_rank_got_wrong_is_wrong_for_all():
    port = free_port()
    orders = [
        ProbeOrder(kind=MACHINE, rank=r, world=2, address="127.0.0.1", port=port, device="cpu", megabytes=1)
        for r in (0, 1)
    ]
    ranks = [
        subprocess.Popen([sys.executable, "-c", _WRONG_SUM, to_json(one)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for one in orders
    ]
    assert [rank.communicate(timeout=60)[0].strip() for rank in ranks] == ["False", "False"]


def test_a_rank_that_hangs_is_ended_and_what_it_said_before_is_kept(tmp_path):
    # Rank 0 waits for a rank 1 that never comes.
    lonely = ProbeOrder(kind=MACHINE, rank=0, world=2, address="127.0.0.1", port=free_port(), device="cpu", megabytes=1)
    (heard,) = work(sys.executable, (lonely,), {}, limit_s=12)
    assert heard.ended
    assert any(one.probe is not None and one.probe.right for one in heard.said)


def member(rank, world, port, **changes):
    plain = {
        "rank": rank,
        "world": world,
        "address": "127.0.0.1",
        "port": port,
        "python": sys.executable,
        "device": "cpu",
        "interface": "lo",
        "own_address": "127.0.0.1",
        "megabytes": 2,
        "limit_s": 60.0,
    }
    return GangOrder(**{**plain, **changes})


def together(orders):
    with ThreadPoolExecutor(max_workers=len(orders)) as hands:
        return tuple(hands.map(take_part, orders))


def test_three_members_exchange_pair_by_pair():
    port = free_port()
    observed = together([member(rank, 3, port) for rank in range(3)])
    assert [one.met for one in observed] == [True, True, True]
    assert observed[0].arrived == (0, 1, 2)
    assert sorted({(p.one, p.other) for one in observed for p in one.pairs}) == [(0, 1), (0, 2), (1, 2)]
    assert all(p.right and p.gbps > 0 for one in observed for p in one.pairs)


@pytest.mark.slow  # the others wait for it
def test_a_member_that_does_not_come_is_blamed_by_those_who_did():
    port = free_port()
    observed = together([member(rank, 3, port, limit_s=24.0) for rank in (0, 2)])
    absent = GangFacts(rank=1, error="no route to host")
    found = blame((*observed, absent), ("i-a", "i-b", "i-c"), efa=False, proven=frozenset())
    assert [(one.rank, one.why) for one in found] == [(1, "it does not reach the others: no route to host")]


def test_an_endpoint_that_answers_is_reached_and_one_that_does_not_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert reach(f"http://127.0.0.1:{port}").error is None
    assert "refused" in (reach(f"http://127.0.0.1:{port}").error or "")


def test_the_disk_is_measured_and_left_as_it_was(tmp_path):
    assert write_mbps(tmp_path) > 1
    assert list(tmp_path.iterdir()) == []
    assert write_mbps(tmp_path / "absent") is None


def test_a_probe_that_is_told_of_cuda_here_says_why_there_is_none():
    one = ProbeOrder(kind=MACHINE, rank=0, world=1, address="127.0.0.1", port=1, device="cuda", megabytes=1)
    (heard,) = work(sys.executable, (one,), NO_CUDA, limit_s=60)
    assert (heard.said[0].torch.available, heard.said[0].torch.cuda, heard.said[0].probe) == (
        False,
        torch.version.cuda,
        None,
    )


def test_on_an_emulated_machine_that_says_so_gpus_are_looked_at_and_not_put_to_work(tmp_path, stand_in, monkeypatch):
    monkeypatch.setenv("GPUCLOUD_STAND_IN_GPUS", "1")
    code, checked = gate(tmp_path, order(full=True, torch=True))
    assert (code, checked.report.torch, len(checked.report.gpus)) == (0, None, 4)
    assert take_part(member(0, 2, 1, device="cuda")) == GangFacts(rank=0, met=True, arrived=(0, 1))
