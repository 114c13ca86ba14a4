"""Terraform outlives its caller, waits for itself, and says what went wrong."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpucloud.adapters.home import bundled
from gpucloud.adapters.terraform import TerraformProvisioner, find_terraform
from gpucloud.adapters.terraform.program import environment
from gpucloud.domain.errors import ProvisionError, ToolMissing
from gpucloud.domain.job.spec import Market
from gpucloud.ports import ClusterSpec
from gpucloud.system import processes
from tests.terraform import StandIn, terraform_over

INSTALL = "install Terraform 1.5 or newer: https://developer.hashicorp.com/terraform/install"
SPEC = ClusterSpec(
    name="digits",
    region="local-1",
    zones=("local-1a",),
    node_type="cpu.2",
    market=Market.SPOT,
    tags=(),
    public_key="ssh-ed25519 AAAA",
    store="/somewhere/store",
)
CALLER = """
import sys
from pathlib import Path
from tests.functional.test_terraform import SPEC
from tests.terraform import StandIn, terraform_over
stand_in = StandIn(Path(sys.argv[1]))
verb = sys.argv[2]
goal = SPEC if verb == "ensure" else SPEC.name
try:
    getattr(terraform_over(stand_in), verb)(goal, story=lambda line: print(line, flush=True))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> StandIn:
    assert find_terraform() is not None, INSTALL
    return StandIn(tmp_path)


def quiet(line: str) -> None:
    """A story that nobody listens to."""


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not happen within 30 s"
        time.sleep(0.01)


def call(stand_in: StandIn, verb: str) -> subprocess.Popen[str]:
    """Another process that calls `verb`, up to where the cloud's function hangs."""
    before = len(stand_in.calls())
    stand_in.hold(on=True)
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER, str(stand_in.root), verb],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )
    eventually(lambda: len(stand_in.calls()) > before)
    return caller


def end(caller: subprocess.Popen[str], number: signal.Signals) -> int:
    caller.send_signal(number)
    caller.communicate(timeout=30)
    return caller.returncode


def below(folder: Path) -> list[int]:
    """Every Terraform, keeper or stand-in that still works for this folder."""
    return [pid for pid in processes.marked("GPUCLOUD_PYTHON", str(folder / "stand-in")) if pid != os.getpid()]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_rerun_waits_for_the_terraform_of_a_killed_caller_and_converges(
    stand_in: StandIn, number: signal.Signals
) -> None:
    end(call(stand_in, "ensure"), number)
    assert below(stand_in.root), "Terraform died with its caller"
    told: list[str] = []

    def story(line: str) -> None:
        told.append(line)
        stand_in.hold(on=False)

    assert terraform_over(stand_in).ensure(SPEC, story=story) == "digits"
    assert told[0] == "another Terraform run for digits has not ended; waiting for it"
    assert stand_in.calls() == ["ensure"], "the first run was not left to finish"
    assert stand_in.clusters() == {"digits": SPEC}
    assert below(stand_in.root) == []


def test_a_destroy_killed_halfway_is_finished_by_the_next_one(stand_in: StandIn) -> None:
    terraform_over(stand_in).ensure(SPEC, story=quiet)
    end(call(stand_in, "destroy"), signal.SIGKILL)
    terraform_over(stand_in).destroy("digits", story=lambda _: stand_in.hold(on=False))
    assert stand_in.clusters() == {}
    assert [path.name for path in (stand_in.root / "work").iterdir() if path.is_dir()] == []


def test_terraform_itself_killed_leaves_a_cluster_that_can_be_made_and_destroyed(stand_in: StandIn) -> None:
    caller = call(stand_in, "ensure")
    for pid in below(stand_in.root):
        os.kill(pid, signal.SIGKILL)
    caller.communicate(timeout=30)
    assert caller.returncode == 1
    stand_in.hold(on=False)
    assert terraform_over(stand_in).ensure(SPEC, story=quiet) == "digits"
    terraform_over(stand_in).destroy("digits", story=quiet)
    assert stand_in.clusters() == {}


def test_what_a_killed_terraform_began_is_destroyed(stand_in: StandIn) -> None:
    caller = call(stand_in, "ensure")
    for pid in below(stand_in.root):
        os.kill(pid, signal.SIGKILL)
    caller.communicate(timeout=30)
    stand_in.hold(on=False)
    terraform_over(stand_in).destroy("digits", story=quiet)
    assert stand_in.calls() == ["ensure", "destroy"]


def test_ctrl_c_lets_terraform_finish_its_call(stand_in: StandIn) -> None:
    caller = call(stand_in, "ensure")
    caller.send_signal(signal.SIGINT)
    assert caller.stdout is not None
    lines = iter(caller.stdout.readline, "")
    assert any(line.startswith("finishing Terraform's call") for line in lines)
    stand_in.hold(on=False)
    caller.communicate(timeout=30)
    assert caller.returncode == 130
    assert stand_in.clusters() == {"digits": SPEC}


class _Lock:
    """A process's lock that Ctrl-C follows at once: a main thread that takes it never gets to letting it go."""

    def __init__(self, lock: threading.Lock, interrupt: Callable[[], None]) -> None:
        self._lock, self._interrupt = lock, interrupt

    def acquire(self, blocking: bool = True) -> bool:
        taken = self._lock.acquire(blocking)
        if taken and threading.current_thread() is threading.main_thread():
            self._interrupt()
        return taken

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def test_ctrl_c_at_any_moment_leaves_the_end_of_terraform_to_be_seen(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Process(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            if "apply" in args[0]:
                self._waitpid_lock = _Lock(self._waitpid_lock, interrupt_once)

    interrupts: list[str] = []

    def interrupt_once(line: str = "") -> None:
        interrupts.append(line)
        if len(interrupts) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr("gpucloud.adapters.terraform.runner.subprocess.Popen", Process)
    with pytest.raises(KeyboardInterrupt):
        terraform_over(stand_in, limit_s=20).ensure(SPEC, story=interrupt_once)
    assert stand_in.clusters() == {"digits": SPEC}


def test_a_second_ctrl_c_leaves_at_once_and_terraform_ends_by_itself(stand_in: StandIn) -> None:
    caller = call(stand_in, "ensure")
    caller.send_signal(signal.SIGINT)
    assert caller.stdout is not None
    assert any(line.startswith("finishing Terraform's call") for line in iter(caller.stdout.readline, ""))
    assert end(caller, signal.SIGINT) == 130
    assert stand_in.clusters() == {}
    terraform_over(stand_in).ensure(SPEC, story=lambda _: stand_in.hold(on=False))
    assert stand_in.calls() == ["ensure"]


def test_a_daemon_started_by_the_cloud_does_not_hold_the_lock(stand_in: StandIn) -> None:
    stand_in.leave_daemon()
    terraform = terraform_over(stand_in, limit_s=10)
    terraform.ensure(SPEC, story=quiet)
    daemon = int((stand_in.root / "daemon").read_text())
    try:
        told: list[str] = []
        terraform.ensure(SPEC, story=told.append)
        assert told == []
    finally:
        os.kill(daemon, signal.SIGKILL)


def test_a_terraform_that_hangs_is_left_behind_after_the_limit(stand_in: StandIn) -> None:
    stand_in.hold(on=True)
    with pytest.raises(ProvisionError, match="Terraform has not ended after 1 s; it goes on by itself"):
        terraform_over(stand_in, limit_s=1).ensure(SPEC, story=quiet)
    with pytest.raises(ProvisionError, match="another Terraform run for digits has not ended after 0 s"):
        terraform_over(stand_in, limit_s=0.2).destroy("digits", story=quiet)
    stand_in.hold(on=False)
    terraform_over(stand_in).destroy("digits", story=quiet)
    assert stand_in.clusters() == {}
    gc.collect()


def test_the_story_tells_what_changed_and_nothing_when_nothing_did(stand_in: StandIn) -> None:
    told: list[str] = []
    terraform = terraform_over(stand_in)
    terraform.ensure(SPEC, story=told.append)
    assert told == ["Terraform made 2 resources"]
    terraform.ensure(SPEC, story=told.append)
    assert len(told) == 1
    terraform.destroy("digits", story=told.append)
    assert told[1:] == ["Terraform removed 2 resources"]


def test_the_variables_are_the_same_for_every_cloud(stand_in: StandIn) -> None:
    terraform_over(stand_in).ensure(SPEC, story=quiet)
    assert json.loads((stand_in.root / "work" / "digits" / "terraform.tfvars.json").read_text()) == {
        "name": "digits",
        "region": "local-1",
        "zones": ["local-1a"],
        "node_type": "cpu.2",
        "market": "spot",
        "tags": {},
        "access": {"public_key": "ssh-ed25519 AAAA", "cidr": "127.0.0.0/8"},
        "store": "/somewhere/store",
        "unattended": False,
    }


def test_the_second_plan_shows_no_difference(stand_in: StandIn) -> None:
    terraform_over(stand_in).ensure(SPEC, story=quiet)
    done = subprocess.run(
        ["terraform", "plan", "-detailed-exitcode", "-input=false", "-no-color"],
        cwd=stand_in.root / "work" / "digits",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_settings_of_the_caller_that_would_break_terraform_are_left_out(stand_in: StandIn) -> None:
    unwanted = {
        "TF_CLI_CONFIG_FILE": "/nowhere/terraformrc",
        "TF_VAR_name": "other",
        "TF_CLI_ARGS": "-no-such-flag",
        "TF_WORKSPACE": "other",
        "TF_DATA_DIR": "/nowhere",
        "TF_LOG": "TRACE",
    }
    terraform_over(stand_in, **unwanted).ensure(SPEC, story=quiet)
    assert stand_in.clusters() == {"digits": SPEC}
    (log,) = (stand_in.root / "work" / "digits" / "logs").iterdir()
    assert all(line.startswith("{") for line in log.read_text().splitlines())


@pytest.mark.parametrize(("callers", "given"), [({}, "400"), ({"GOGC": "50"}, "50")])
def test_go_collects_garbage_seldom_unless_the_caller_says_how_often(callers: dict[str, str], given: str) -> None:
    assert environment(callers)["GOGC"] == given


def test_a_failure_names_its_log(stand_in: StandIn) -> None:
    stand_in.refuse("no room")
    with pytest.raises(ProvisionError) as caught:
        terraform_over(stand_in).ensure(SPEC, story=quiet)
    assert caught.value.message == "terraform apply: terraform_data.settings: no room"
    log = caught.value.hint.removeprefix("see ")
    assert "no room" in Path(log).read_text()


def test_a_module_that_terraform_refuses_is_explained(stand_in: StandIn, tmp_path: Path) -> None:
    module = tmp_path / "module"
    module.mkdir()
    (module / "main.tf").write_text('resource "terraform_data" "a" {\n  input = nonsense.b\n}\n')
    provisioner = TerraformProvisioner(module, tmp_path / "work", dict(os.environ))
    with pytest.raises(ProvisionError, match='A managed resource "nonsense" "b" has not been declared'):
        provisioner.ensure(SPEC, story=quiet)


def test_a_module_with_a_backend_is_initialised_once(stand_in: StandIn, tmp_path: Path) -> None:
    module = tmp_path / "module"
    module.mkdir()
    for path in bundled("terraform", "local").glob("*.tf"):
        (module / path.name).write_bytes(path.read_bytes())
    (module / "backend.tf").write_text('terraform {\n  backend "local" {}\n}\n')
    env = {**os.environ, "GPUCLOUD_PYTHON": str(stand_in.program)}
    provisioner = TerraformProvisioner(module, tmp_path / "work", env)
    provisioner.ensure(SPEC, story=quiet)
    provisioner.ensure(replace(SPEC, node_type="cpu.4"), story=quiet)
    logs = sorted(path.name for path in (tmp_path / "work" / "digits" / "logs").iterdir())
    assert logs == ["000001-init.jsonl", "000002-apply.jsonl", "000003-apply.jsonl"]


def test_nothing_is_left_in_the_temporary_folder(stand_in: StandIn, tmp_path: Path) -> None:
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    terraform = terraform_over(stand_in, TMPDIR=str(scratch))
    terraform.ensure(SPEC, story=quiet)
    terraform.destroy("digits", story=quiet)
    assert list(scratch.iterdir()) == []
    assert sorted(path.name for path in (stand_in.root / "work").iterdir()) == ["digits.lock", "terraform-version"]


def test_a_name_that_is_a_path_is_refused(stand_in: StandIn) -> None:
    with pytest.raises(ProvisionError, match="is not a cluster's name"):
        terraform_over(stand_in).destroy("../digits", story=quiet)


def test_the_local_module_is_formatted_and_valid(stand_in: StandIn) -> None:
    module = str(bundled("terraform", "local"))
    assert subprocess.run(["terraform", f"-chdir={module}", "fmt", "-check", "-diff"]).returncode == 0
    done = subprocess.run(["terraform", f"-chdir={module}", "validate", "-json"], capture_output=True)
    assert json.loads(done.stdout)["valid"] is True


def program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return path


def test_a_named_terraform_goes_before_the_one_on_path(tmp_path: Path) -> None:
    named = program(tmp_path / "tf", "")
    assert find_terraform({"GPUCLOUD_TERRAFORM": str(named), "PATH": os.environ["PATH"]}) == named
    assert find_terraform({"PATH": str(tmp_path)}) is None


def test_a_named_terraform_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ToolMissing, match="GPUCLOUD_TERRAFORM names /nowhere/tf, which is not a program"):
        find_terraform({"GPUCLOUD_TERRAFORM": "/nowhere/tf", "PATH": os.environ["PATH"]})


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("""echo '{"terraform_version": "1.4.7"}'""", "is Terraform 1.4.7, which is too old"),
        ("""echo '{"terraform_version": "new"}'""", "has no version that can be read: new"),
        ("echo Terraform v0.11", "does not answer as Terraform does"),
        ("exit 3", "does not answer as Terraform does"),
    ],
)
def test_an_old_or_foreign_terraform_is_refused(stand_in: StandIn, script: str, message: str) -> None:
    old = program(stand_in.root / "tf", script)
    with pytest.raises(ToolMissing, match=message) as caught:
        terraform_over(stand_in, GPUCLOUD_TERRAFORM=str(old)).ensure(SPEC, story=quiet)
    assert "https://developer.hashicorp.com/terraform/install" in caught.value.hint


def test_the_version_is_asked_for_once(stand_in: StandIn) -> None:
    counter = stand_in.root / "asked"
    script = f'test "$1" = version && echo >> {counter}\nexec {find_terraform()} "$@"'
    terraform = terraform_over(stand_in, GPUCLOUD_TERRAFORM=str(program(stand_in.root / "tf", script)))
    terraform.ensure(SPEC, story=quiet)
    terraform.ensure(SPEC, story=quiet)
    assert counter.read_text() == "\n"


def test_without_terraform_the_error_says_how_to_get_it(stand_in: StandIn, tmp_path: Path) -> None:
    with pytest.raises(ToolMissing, match="Terraform is not installed") as caught:
        terraform_over(stand_in, PATH=str(tmp_path)).ensure(SPEC, story=quiet)
    assert caught.value.exit_code == 5
