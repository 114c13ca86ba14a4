"""The station as it runs in an agent. Where a GPU is needed, a stand-in for nvidia-smi says what one would."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpucloud.adapters.packaging import package_zip
from gpucloud.agent.metrics.endpoint import Endpoint
from gpucloud.agent.metrics.kernel_log import KernelLog
from gpucloud.agent.metrics.node_metrics import Machine, SampleWriter
from gpucloud.agent.metrics.sampler import Sampler
from gpucloud.domain.codec import from_json
from gpucloud.domain.node.hardware import HostSample
from gpucloud.domain.node.status import Outcome
from gpucloud.domain.node.use import Span
from tests.standins.agent_node import AgentNode, wait_until
from tests.standins.nvidia_smi import NvidiaSmi

pytestmark = pytest.mark.alone  # samples once a second

RECORD = "4,1,2,-;NVRM: Xid (PCI:0000:05:00): 79, pid=1, name=python3, GPU has fallen off the bus.\n"


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    data, sha256 = package_zip()
    path = tmp_path_factory.mktemp("lib") / f"gpucloud-{sha256}.zip"
    path.write_bytes(data)
    return path


@pytest.fixture
def standin(tmp_path):
    return NvidiaSmi(tmp_path / "bin")


@pytest.fixture
def sampler(standin):
    one = Sampler(str(standin.path), every_ms=300, hangs_s=1.0)
    one.start()
    yield one
    one.stop()


@pytest.fixture
def node(tmp_path, package):
    node = AgentNode(tmp_path, package)
    node.env["GPUCLOUD_METRICS_PORT"] = "0"
    yield node
    node.destroy()


@pytest.fixture
def gpu_node(node, standin):
    node.env["PATH"] = f"{standin.folder}{os.pathsep}{node.env['PATH']}"
    return node


def uses(sampler):
    return [gpu.use for gpu in sampler.newest]


def test_every_device_of_the_standin_is_sampled_again_and_again(standin, sampler):
    wait_until(lambda: len(sampler.newest) == 4, "a whole round")
    assert [(gpu.index, gpu.temperature, gpu.slowdowns) for gpu in sampler.newest] == [
        (index, 60 + index, ("sw_power_cap",)) for index in range(4)
    ]
    standin.order(gpus=4, use=[1, 2, 3, 4])
    wait_until(lambda: uses(sampler) == [1, 2, 3, 4], "the next round")
    assert standin.starts == 1


def test_a_standin_that_dies_is_started_again(standin, sampler):
    wait_until(lambda: sampler.newest, "a round")
    standin.order(gpus=4, exit=15, say="GPU is lost")
    wait_until(lambda: sampler.said == "GPU is lost", "its last words")
    standin.order(gpus=2)
    wait_until(lambda: len(sampler.newest) == 2, "a round of the next one")
    assert sampler.said == ""


def test_a_standin_that_hangs_is_ended_and_started_again(standin, sampler):
    wait_until(lambda: sampler.newest, "a round")
    standin.order(gpus=4, hang=True)
    wait_until(lambda: standin.starts == 2, "another one")
    standin.order(gpus=3)
    wait_until(lambda: len(sampler.newest) == 3, "a round of the next one")


def test_a_standin_of_an_older_driver_is_asked_in_its_own_words(standin, tmp_path):
    standin.order(gpus=1, refuse="clocks_event_reasons.active")
    sampler = Sampler(str(standin.path), every_ms=300)
    sampler.start()
    try:
        wait_until(lambda: sampler.newest, "a round")
        assert sampler.newest[0].slowdowns == ("sw_power_cap",)
    finally:
        sampler.stop()


def test_the_agent_reports_what_the_standin_says_and_only_devices_that_the_job_sees(gpu_node):
    gpu_node.start()
    gpu_node.want(gpu_node.python(1, "import time; time.sleep(60)", CUDA_VISIBLE_DEVICES="2,0"))
    gpu_node.wait_running(1)
    status = gpu_node.wait_for(lambda s: [gpu.index for gpu in s.gpus] == [2, 0], "two devices")
    assert (status.gpus[0].temperature, status.gpus[0].memory_mib, status.unhealthy) == (62, 143771, None)


def test_the_sampler_is_no_part_of_an_attempt_and_outlives_it(gpu_node, standin):
    gpu_node.start()
    gpu_node.wait_for(lambda s: s.gpus, "the first round")
    gpu_node.want(gpu_node.python(1, "pass"))
    assert gpu_node.wait_exited(1).attempt.outcome is Outcome.DONE
    ended = datetime.now(timezone.utc)
    gpu_node.wait_for(lambda s: s.gpus and s.gpus[0].at > ended, "a round after the end")
    assert standin.starts == 1


def test_memory_errors_of_the_standin_during_an_attempt_make_the_node_ill(gpu_node, standin):
    standin.order(gpus=4, ecc=[7, 0, 0, 0])
    gpu_node.start()
    gpu_node.want(gpu_node.python(1, "import time; time.sleep(60)"))
    gpu_node.wait_running(1)
    gpu_node.wait_for(lambda s: s.gpus, "the first round")
    wait_until(lambda: "gpucloud_gpus_unhealthy 0" in metrics(gpu_node), "a look")
    standin.order(gpus=4, ecc=[7, 0, 2, 0])
    status = gpu_node.wait_for(lambda s: s.unhealthy, "the illness")
    assert status.unhealthy == "GPU 2: 2 uncorrected memory errors during the attempt"


def test_a_device_that_the_standin_loses_makes_the_node_ill(gpu_node, standin):
    gpu_node.start()
    gpu_node.want(gpu_node.python(1, "import time; time.sleep(60)"))
    gpu_node.wait_running(1)
    gpu_node.wait_for(lambda s: len(s.gpus) == 4, "the first round")
    wait_until(lambda: "gpucloud_gpus_unhealthy 0" in metrics(gpu_node), "a look")
    time.sleep(1.1)  # one more look, so that the attempt has seen them
    standin.order(gpus=3)
    status = gpu_node.wait_for(lambda s: s.unhealthy, "the illness")
    assert status.unhealthy == "GPU 3 (GPU-00000003-0000-0000-0000-000000000003) is no longer listed"


def test_without_nvidia_smi_nothing_of_gpus_runs(node, tmp_path):
    node.env["PATH"] = str(tmp_path)
    node.start()
    status = node.wait_for(lambda s: s.host, "the host's figures")
    assert (status.gpus, status.unhealthy) == ((), None)
    assert children(node.pid) == []
    assert 0 < status.host.memory_used_mib < status.host.memory_mib


def test_every_line_is_one_that_prometheus_reads(gpu_node):
    gpu_node.start()
    progress = json.dumps(
        {"step": 7, "first_step": 1, "total_steps": 9, "loss": float("nan"), "phase": "train", "committed_step": None}
        | {"step_seconds": 0.25, "waiting_share": 0.5, "written_at": 1.0}
    )
    code = (
        "import os, pathlib, time\n"
        f"pathlib.Path(os.environ['GPUCLOUD_ATTEMPT_DIR'], 'progress.json').write_text({progress!r})\n"
        "time.sleep(60)"
    )
    gpu_node.want(gpu_node.python(1, code))
    gpu_node.wait_for(lambda s: s.gpus and s.attempt and s.attempt.progress, "steps and GPUs")
    wait_until(lambda: "gpucloud_host_cpu_ratio" in metrics(gpu_node), "two looks at the machine")
    families = {family.name: family for family in text_string_to_metric_families(metrics(gpu_node))}
    assert all(family.documentation and family.type in ("gauge", "counter") for family in families.values())
    hot = families["DCGM_FI_DEV_GPU_TEMP"].samples[3]
    assert (hot.value, hot.labels["gpu"], hot.labels["UUID"]) == (63.0, "3", "GPU-00000003-0000-0000-0000-000000000003")
    assert families["gpucloud_step"].samples[0].value == 7
    assert families["gpucloud_waiting_ratio"].samples[0].value == 0.5
    assert [s.labels["reason"] for s in families["gpucloud_gpu_slowdown"].samples] == ["sw_power_cap"] * 4


def test_the_endpoint_answers_on_loopback_and_on_no_other_address():
    endpoint = Endpoint(lambda: "gpucloud_step 1\n", port=0)
    endpoint.start()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=5) as answer:
            assert answer.read() == b"gpucloud_step 1\n"
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert addresses_of(endpoint.port) == ["127.0.0.1"]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", endpoint.port), timeout=5)
    finally:
        endpoint.stop()


def test_another_path_is_not_found():
    endpoint = Endpoint(lambda: "", port=0)
    endpoint.start()
    try:
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/etc/passwd", timeout=5)
    finally:
        endpoint.stop()


def test_a_port_that_is_taken_gives_another_one():
    first = Endpoint(lambda: "", port=0)
    second = Endpoint(lambda: "", port=first.port)
    assert second.port not in (0, first.port)
    first.stop()
    second.stop()


def test_a_history_line_is_written_as_the_attempt_goes_on_and_at_its_end(gpu_node):
    gpu_node.start()
    gpu_node.want(gpu_node.python(1, "import time; time.sleep(3)"))
    gpu_node.wait_exited(1)
    path = gpu_node.folder(1) / "metrics.jsonl"
    wait_until(path.exists, "the history")
    spans = [from_json(Span, line) for line in path.read_text().splitlines()]
    assert len(spans) == 1
    assert [gpu.index for gpu in spans[0].gpus] == [0, 1, 2, 3]
    assert (spans[0].gpus[0].use, spans[0].gpus[0].power) == (90.0, 512.2)
    assert spans[0].host.memory_mib > 0


def test_a_span_ends_after_ten_seconds_and_the_rest_with_the_attempt(tmp_path):
    sample_writer, path = SampleWriter(), tmp_path / "metrics.jsonl"
    start = datetime(2026, 3, 1, 12, 0, tzinfo=timezone.utc)
    for second in range(15):
        at = start + timedelta(seconds=second)
        host = HostSample(
            at=at, cpu=float(second), memory_used_mib=100 + second, memory_mib=4000, disk_free_mib=9000 - second,
            received=1000 * second, sent=0,
        )  # fmt: skip
        sample_writer.keep(path, (), host, at)
    sample_writer.end()
    first, rest = (from_json(Span, line) for line in path.read_text().splitlines())
    assert (first.start, first.seconds, first.host.cpu) == (start, 10.0, 5.0)
    assert (first.host.memory_used_mib, first.host.disk_free_mib, first.host.received) == (110, 8990, 10000)
    assert (rest.start, rest.host.received) == (start + timedelta(seconds=10), 4000)


def test_errors_in_the_kernel_log_are_seen_from_now_on(tmp_path):
    kmsg = tmp_path / "kmsg"
    kmsg.write_text(RECORD)
    log = KernelLog(kmsg)
    assert log.readable
    assert log.news() == ()
    with kmsg.open("a") as file:
        file.write("6,3,4,-;eth0: link up\n" + RECORD[:30])
        file.flush()
        assert log.news() == ()
        file.write(RECORD[30:])
    assert [(xid.number, xid.pci) for xid in log.news()] == [(79, "0000:05:00")]
    with kmsg.open("a") as file:
        file.write("12" + RECORD[RECORD.index(",") :])  # by a program: `echo >/dev/kmsg`
        file.write("x" * 1_000_000)
    assert log.news() == ()
    assert len(log._rest) == 65536
    log.close()


@pytest.mark.parametrize(
    ("answer", "readable"), [("echo a line of the kernel", True), ("exit 0", False), ("exit 1", False)]
)
def test_a_journal_that_tells_nothing_may_not_be_read(tmp_path, monkeypatch, answer, readable):
    journal = tmp_path / "journalctl"
    journal.write_text(f"#!/bin/sh\n{answer}\n")
    journal.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    log = KernelLog(tmp_path / "kmsg")
    assert (log.readable, log.pid is not None) == (readable, readable)
    log.close()


def test_what_goes_over_a_bond_or_a_bridge_is_counted_at_the_cards_alone(tmp_path):
    counts = {"lo": 9, "eth0": 100, "eth1": 200, "bond0": 300, "bond0.120": 300, "docker0": 50, "veth1": 50}
    rows = "".join(f"{name:>6}: {count} 0 0 0 0 0 0 0 {count * 2} 0 0 0 0 0 0 0\n" for name, count in counts.items())
    proc, net = tmp_path / "proc", tmp_path / "class"
    (proc / "net").mkdir(parents=True)
    (proc / "net/dev").write_text(f"Inter-|   Receive\n face |bytes\n{rows}")
    for name in ("stat", "meminfo"):
        (proc / name).write_bytes(Path("/proc", name).read_bytes())
    container = Machine(tmp_path, proc, net).look()
    (net / "eth0/device").mkdir(parents=True)
    (net / "eth1/device").mkdir(parents=True)
    machine = Machine(tmp_path, proc, net).look()
    assert (machine.received, machine.sent) == (300, 600)
    assert (container.received, container.sent) == (1000, 2000)


def test_the_machines_cores_are_counted_between_two_looks(tmp_path):
    machine = Machine(tmp_path)
    first = machine.look()
    assert first is not None
    assert first.cpu is None
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        pass
    second = machine.look()
    assert second is not None
    assert second.cpu is not None
    assert 10 < second.cpu <= 100


def metrics(node) -> str:
    command = [sys.executable, "-I", str(node.package), "metrics", "--root", str(node.root)]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout


def children(pid: int) -> list[str]:
    listed = subprocess.run(["ps", "--ppid", str(pid), "-o", "args="], capture_output=True, text=True)
    return listed.stdout.splitlines()


def addresses_of(port: int) -> list[str]:
    """The local addresses on which anything listens at this port (proc(5), /proc/net/tcp: state 0A is LISTEN)."""
    tables = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
    rows = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
    found = [row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port]
    return [socket.inet_ntoa(bytes.fromhex(address)[::-1]) for address in found]
