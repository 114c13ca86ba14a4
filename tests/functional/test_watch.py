"""How a running job is looked at from another terminal, over real SSH, and what is left of it afterwards."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.commandline import command_line, until


@pytest.fixture
def line(tmp_path):
    with command_line(tmp_path) as found:
        yield found


@pytest.mark.slow  # half a minute on busy cores
def test_a_job_is_watched_from_another_terminal_and_its_use_is_kept_after_it_ended(line):
    train = line.start("train", line.job(step_s=0.2, steps=3000), "--json")
    until(lambda: line.step() >= 3, "step 3")

    job = line.run("status", "small", "--json").json
    assert [(node["answers"], node["gpus"], node["unhealthy"]) for node in job["use"]] == [(True, [], None)] * 2
    assert all(0 < node["host"]["memory_used_mib"] < node["host"]["memory_mib"] for node in job["use"])

    figures = {f.name: f for f in text_string_to_metric_families(line.run("metrics", "small").stdout)}
    assert figures["gpucloud_attempt"].samples[0].value == 1
    assert figures["gpucloud_host_memory_bytes"].samples[0].value > 0

    watch = subprocess.Popen(
        line.argv("watch", "small", "--json"), env=line.env, cwd=line.folder, stdout=subprocess.PIPE, text=True
    )
    first = json.loads(watch.stdout.readline())
    watch.send_signal(signal.SIGINT)
    watch.communicate(timeout=30)
    assert watch.returncode == 130
    assert (first["version"], first["job"], len(first["use"])) == (1, "small", 2)
    assert train.poll() is None

    assert line.run("down", "small").code == 0
    train.wait(60)
    kept = line.run("status", "small", "--history", "--json").json["history"]
    assert [node["attempt"] for node in kept] == [1, 1]
    assert all(sum(span["seconds"] for span in node["spans"]) > 1 for node in kept)
    assert "machine" in line.run("status", "small", "--history").stdout
    assert line.run("watch", "small").stdout.startswith("small: stopped")
