"""A script that no agent started, as under Slurm, Kubernetes or torchrun: what it does on their signals."""

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpucloud.resume.folder import Signals
from gpucloud.resume.run import Run
from gpucloud.resume.save import agreement
from tests.standins.saved_runs import PREFIX, SavedRun, forking

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import os, signal, sys, time
import torch
from gpucloud import resume

if "handler" in sys.argv:
    signal.signal(signal.SIGTERM, lambda number, frame: print("own handler", flush=True))
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
run = resume.init(model=model, optimizer=optimizer, total_steps=6)
print("from", run.steps_done, flush=True)
for (batch,) in run.loader(torch.utils.data.TensorDataset(torch.zeros(20, 2)), global_batch=4, num_workers=1):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
    if run.steps_done == 2 and sys.argv[1] != "none":
        os.kill(0 if "group" in sys.argv else os.getpid(), getattr(signal, sys.argv[1]))
        time.sleep(0.1)
    run.step()
run.done()
print("handlers are back", signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL, flush=True)
"""


def script(folder, *arguments, file=("-c", SCRIPT)):
    named = {name: value for name, value in os.environ.items() if not name.startswith("GPUCLOUD_")}
    return subprocess.run(
        [sys.executable, *file, *arguments],
        cwd=folder,
        env={**named, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    "arguments",
    [("SIGTERM", "handler"), *(pytest.param((s, "group"), marks=pytest.mark.slow) for s in ("SIGUSR1", "SIGTERM"))],
)
def test_a_script_saves_and_leaves_at_its_next_step_on_a_schedulers_signal_and_goes_on_from_there(tmp_path, arguments):
    left = script(tmp_path, *arguments)
    assert left.returncode == 75, left.stderr
    assert f"asked to stop ({arguments[0]}): saved step 3, leaving" in left.stderr
    assert ("own handler" in left.stdout) == ("handler" in arguments)
    done = script(tmp_path, "none")
    assert (done.returncode, done.stdout.split()) == (0, ["from", "3", "handlers", "are", "back", "True"]), done.stderr


def test_a_resume_is_exact_for_the_same_files_and_options_alone_and_a_run_that_is_over_says_so(tmp_path):
    (tmp_path / "train.py").write_text(f"import net{SCRIPT}")
    (tmp_path / "net.py").write_text("WIDTH = 2")

    def told(*arguments):
        done = script(tmp_path, *arguments, file=("train.py",))
        return [line.removeprefix("gpucloud: ") for line in done.stderr.splitlines() if line.startswith("gpucloud: ")]

    assert told("SIGTERM")[-1] == "asked to stop (SIGTERM): saved step 3, leaving"
    place = tmp_path / ".gpucloud-checkpoints"
    kept = tmp_path / "kept"
    shutil.copytree(place, kept)
    options = told("none")
    assert options[0].startswith("this resume is best_effort, not exact: options "), options
    over = told("none")
    assert over == [
        *("this resume is best_effort, not exact: " + options[0].partition("exact: ")[2],),
        "resumed from step 6, best_effort (attempt 1)",
        f"WARNING: the run in {place} is over: it has done its 6 steps, and nothing was left to train",
        f"for a new run delete {place}, or have GPUCLOUD_STORE name another place; for a longer one give it more steps"
        " or epochs",
    ]
    shutil.rmtree(place)
    kept.rename(place)
    (tmp_path / "net.py").write_text("WIDTH = 3")
    assert told("SIGTERM") == [
        "this resume is best_effort, not exact: code of net.py",
        "resumed from step 3, best_effort (attempt 1)",
    ]


def test_where_one_rank_alone_is_told_all_leave_after_the_same_quick_step(tmp_path):
    run = SavedRun(tmp_path / "run", ranks=2, every=1000)
    step = Run.step

    def alone(rank):
        del os.environ["GPUCLOUD_ATTEMPT_DIR"]
        agreement._QUICK_S = math.inf

        def told(self, **how):
            if rank == 1 and self.steps_done == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            step(self, **how)

        Run.step = told

    with forking():
        assert run.attempt(alone) == [75, 75]
    assert [path.stem for path in (run.folder / "store" / PREFIX / "commit").glob("*/*.json")] == ["000000004"]


@pytest.fixture
def signals():
    heard = Signals()
    heard.listen()
    yield heard
    heard.close()


def child():
    """Fork one that waits, as a data loader's worker, and return its process once it does."""
    ready, tell = os.pipe()
    process = os.fork()
    if not process:
        with contextlib.suppress(BaseException):
            os.write(tell, b"1")  # what comes before that, Python forgets as it forks
            time.sleep(60)
        os._exit(7)
    os.read(ready, 1)
    return process


def ended(process):
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def test_a_worker_that_its_parent_ends_is_ended(signals):
    worker = child()
    os.kill(worker, signal.SIGTERM)
    assert ended(worker) == -signal.SIGTERM
    assert not signals.heard


@pytest.mark.parametrize("older", [False, True])
def test_a_script_that_was_forked_by_one_takes_signals_by_itself(request, older):
    """An older listener that was closed while a newer one had the signals is still in between."""
    before = Signals()
    if older:
        before.listen()
    signals = request.getfixturevalue("signals")
    before.close()
    ready, tell = os.pipe()
    process = os.fork()
    if not process:
        with contextlib.suppress(BaseException):
            own = Signals()
            own.listen()
            os.write(tell, b"1")
            while not own.heard:
                time.sleep(0.01)
            os._exit(0)
        os._exit(7)
    os.read(ready, 1)
    os.kill(process, signal.SIGTERM)
    assert ended(process) == 0
    assert not signals.heard


def test_a_worker_outlives_a_notice_to_all_until_its_parent_is_over(signals):
    worker = child()
    for process in (worker, os.getpid()):
        os.kill(process, signal.SIGUSR1)
        os.kill(process, signal.SIGTERM)
    assert signals.heard == "SIGUSR1"
    assert os.waitpid(worker, os.WNOHANG) == (0, 0)
    signals.close()
    os.kill(worker, signal.SIGTERM)
    assert ended(worker) == -signal.SIGTERM


def test_what_the_script_ignores_stays_ignored_and_its_handlers_are_given_back():
    called = []

    def own(number, _frame):
        called.append(number)

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN), signal.signal(signal.SIGUSR1, own)
    try:
        heard = Signals()
        heard.listen()
        os.kill(os.getpid(), signal.SIGTERM)
        assert not heard.heard
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (heard.heard, called) == ("SIGUSR1", [signal.SIGUSR1])
        heard.close()
        assert signal.getsignal(signal.SIGUSR1) is own
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGUSR1, before[1])
