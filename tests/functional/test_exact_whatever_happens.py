"""Minutes long (`-m slow`): what no single case shows, that no moment is a bad one.

Every case prints one line `FIGURE name value limit pass|fail`: steps lost, or machines too many.
"""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from tests.bench.figures import figure
from tests.commandline import command_line, until, weights

pytestmark = [pytest.mark.slow]
STEPS = 60


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    with command_line(tmp_path_factory.mktemp("plain")) as line:
        assert line.run("train", line.job(steps=STEPS, step_s=0.05)).code == 0
        return weights(line)


CASES = [(kind, seed) for kind in ("notice", "lost", "both") for seed in range(4)]


@pytest.mark.parametrize(("kind", "seed"), CASES, ids=str)
def test_weights_equal_those_of_an_undisturbed_run(tmp_path, uninterrupted, kind, seed):
    chance = random.Random(f"{kind}{seed}")
    with command_line(tmp_path) as line:
        train = line.start("train", line.job(steps=STEPS, step_s=0.05), "--json")
        events = {"notice": [True], "lost": [False], "both": [True, False]}[kind]
        moments = sorted(chance.sample(range(5, STEPS - 5), len(events)))
        for notice, step in zip(events, moments, strict=True):
            until(lambda step=step: line.step() >= step or train.poll() is not None, f"step {step}")
            until(lambda: len(line.nodes()) >= 2, "two machines")
            line.group.interrupt("gpucloud-small", chance.choice(line.nodes()), notice=notice)

        assert train.wait(timeout=200) == 0, (line.folder / "err").read_text()
        same = weights(line) == uninterrupted
        figure(f"weights_differ_{kind}_{seed}", 0 if same else 1, 0)
        assert same, (line.folder / "err").read_text()


@pytest.mark.parametrize("seed", range(10))
def test_a_supervisor_killed_at_any_moment_is_followed_by_the_same_command(tmp_path, uninterrupted, seed):
    chance = random.Random(seed)
    with command_line(tmp_path) as line:
        job = line.job(steps=STEPS, step_s=0.05)
        for _ in range(3):
            train = line.start("train", job, "--drill", "--json")
            time.sleep(chance.uniform(0.2, 7.0))
            os.kill(train.pid, signal.SIGKILL)
            train.wait()
            figure(f"machines_too_many_{seed}", max(0, len(line.nodes()) - 3), 0)
            assert len(line.nodes()) <= 3  # two, and one that replaces a taken one

        answer = line.run("train", job, "--json")

        assert answer.code == 0, answer.stderr
        name = answer.json["job"]
        attempts = answer.json["attempts"]
        assert [a["number"] for a in attempts] == list(range(1, len(attempts) + 1))
        assert weights(line, name) == uninterrupted
        assert line.nodes(name) == []
