"""Bootstrap over a host that is this machine with another home."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import zipfile
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path

import pytest

from gpucloud.adapters.packaging import package_zip
from gpucloud.domain.errors import GateRefused, NodeError, RemoteCommandFailed, SetupFailed
from gpucloud.domain.job.spec import GatePolicy, Job, Market, Resources
from gpucloud.domain.node.node import Node, NodeState
from gpucloud.domain.offer import Pool
from gpucloud.ports import Completed
from gpucloud.usecases.services import Package
from gpucloud.usecases.supervise.bootstrap import bootstrap
from gpucloud.usecases.supervise.needs import of_node, wanted_for
from tests.standins.agent_node import AgentNode
from tests.standins.packages import wheel

RECORDED = Path(__file__).parent.parent / "data" / "nvidia_smi" / "h200x4.xml"


class SystemClock:
    def now(self):
        return datetime.now(timezone.utc)

    def sleep(self, seconds):
        raise AssertionError("bootstrap waits for nothing")


class PassingClock(SystemClock):
    """A clock whose waits are over at once; `meanwhile` is what happens in them."""

    def __init__(self, meanwhile=lambda: None):
        self.waits: list[float] = []
        self._meanwhile = meanwhile

    def sleep(self, seconds):
        self.waits.append(seconds)
        self._meanwhile()


class HereHost:
    """Runs commands on this machine; `fail_at` breaks the connection instead of the n-th command."""

    def __init__(self, home: Path, **env: str):
        self.node = Node(
            id="n1", pool=Pool(instance_type="cpu", zone="a", market=Market.SPOT), state=NodeState.RUNNING,
            launched_at=datetime.now(timezone.utc), address="127.0.0.1", port=22, user="me",
            private_address="127.0.0.1", interface="lo",
        )  # fmt: skip
        self.env = {
            **os.environ, "HOME": str(home), "GPUCLOUD_PYTHON": sys.executable, "AWS_EC2_METADATA_DISABLED": "true",
            **env,
        }  # fmt: skip
        self.home = home
        self.commands: list[tuple[str, ...]] = []
        self.fail_at: int | None = None

    def renew(self):
        pass

    def run(self, argv, *, stdin=b"", timeout_s=30.0):
        self.commands.append(argv)
        if len(self.commands) == self.fail_at:
            raise ConnectionResetError
        done = subprocess.run(argv, input=stdin, capture_output=True, timeout=timeout_s, env=self.env, cwd=self.home)
        return Completed(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)


@pytest.fixture(scope="module")
def package():
    data, sha256 = package_zip()
    return Package(data=data, sha256=sha256)


@pytest.fixture
def code(tmp_path):
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "requirements.txt").write_text("numpy\n")
    return folder


@pytest.fixture
def home(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    yield home
    AgentNode(home, Path()).destroy()


def job(code, run="train.py", **changes):
    return Job(name="j", run=run, budget_usd=Decimal(1), source=code / "j.yaml", code=code, **changes)


def fit(host, package, job, secrets=None, *, store_url="file:///store", power_off=(), clock=None, **told):
    wanted = wanted_for(
        job, package=package.sha256, code=str(job.code), secrets=secrets or {}, store_url=store_url, power_off=power_off
    )
    wanted = of_node(wanted, job, None, host.node, store_url)
    return bootstrap(host, wanted, package, clock or SystemClock(), **told)


def test_a_bare_node_gets_package_and_agent_and_a_second_run_changes_nothing_in_one_round_trip(home, code, package):
    host = HereHost(home)
    first = fit(host, package, job(code))
    assert first.changed == ("package", "agent")
    assert (first.python, first.root) == (sys.executable, str(home / ".gpucloud"))
    assert Path(first.package_path).read_bytes() == package.data
    assert "no NVIDIA device: CPU, gloo" in first.findings
    host.commands.clear()
    second = fit(host, package, job(code))
    assert (second.changed, len(host.commands)) == ((), 1)
    assert second.lock == first.lock == json.loads(json.dumps(first.lock))


@pytest.mark.parametrize("n", [2, 5, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4, 6))])
def test_a_bootstrap_cut_off_at_any_command_is_finished_by_the_next(home, code, package, n):
    host = HereHost(home)
    wanted = job(code, setup="echo run >>runs")
    host.fail_at = n
    with pytest.raises(ConnectionResetError):
        fit(host, package, wanted)
    host.fail_at = None
    again = fit(host, package, wanted)
    assert fit(host, package, wanted).changed == ()
    assert again.python == fit(host, package, wanted).python
    assert (code / "runs").read_text() == "run\n"


def test_a_package_that_arrives_torn_is_not_there(home, code, package):
    host = HereHost(home)
    torn = Package(data=package.data[:-1], sha256=package.sha256)
    with pytest.raises(RemoteCommandFailed, match="arrived torn"):
        fit(host, torn, job(code))
    assert list((home / ".gpucloud").glob("**/*.zip*")) == []


@pytest.mark.parametrize("changed", [lambda data: b"\0" * len(data), lambda data: data + b"\0"])
def test_a_package_that_rotted_on_the_node_is_shipped_again(home, code, package, changed):
    host = HereHost(home)
    path = Path(fit(host, package, job(code)).package_path)
    path.write_bytes(changed(package.data))
    assert fit(host, package, job(code)).changed[0] == "package"
    assert path.read_bytes() == package.data


def test_setup_runs_once_in_a_layer_over_the_nodes_python_and_its_programs_find_it(home, code, package):
    _wheel(code / "greeter-1-py3-none-any.whl")
    host = HereHost(home)
    setup = 'pip install --no-index -q greeter-1-py3-none-any.whl && echo "$VIRTUAL_ENV $TOKEN" >seen'
    wanted = job(code, setup=setup, env=(("TOKEN", "t0k"),))
    done = fit(host, package, wanted, {"SECRET": "s3cret"})
    assert "setup" in done.changed
    layer = Path(done.python).parent.parent
    assert (code / "seen").read_text() == f"{layer} t0k\n"
    assert subprocess.run([layer / "bin" / "greet"], capture_output=True, text=True).stdout == "hello\n"
    shown = subprocess.run(
        [done.python, "-c", "import sys, greeter, pytest; print(sys.prefix, pytest.__file__)"],
        capture_output=True,
        text=True,
    )
    assert shown.stdout == f"{layer} {pytest.__file__}\n"
    assert fit(host, package, wanted).changed == ()
    assert not any("s3cret" in word for argv in host.commands for word in argv)


SETUP = """\
# what it needs
for i in $(seq 100); do
  echo line $i
done
echo try >>tries
[ -f mended ] || { touch "$VIRTUAL_ENV/rest"; echo no such wheel >&2; exit 9; }
[ ! -e "$VIRTUAL_ENV/rest" ]
"""
FAILS = '[ -f mended ] || { touch "$VIRTUAL_ENV/rest"; echo no such wheel >&2; exit 9; }'


def test_a_setup_that_fails_twice_by_the_same_command_on_one_machine_is_the_jobs_own_fault(home, code, package):
    host, clock, told = HereHost(home), PassingClock(), []
    with pytest.raises(SetupFailed) as caught:
        fit(host, package, job(code, setup=SETUP), clock=clock, story=told.append)
    failed = caught.value
    assert (failed.exit_code, failed.hint) == (20, "mend `setup:` in the job file")
    assert failed.message == f"setup: `{FAILS}` ended with exit code 9: no such wheel"
    assert failed.shown.startswith(f"setup failed twice on n1: `{FAILS}` ended with exit code 9:\nline 82\n")
    assert failed.shown.endswith("\nline 100\nno such wheel")
    assert failed.log.startswith("line 1\n")
    assert ((code / "tries").read_text(), clock.waits) == ("try\ntry\n", [5.0])
    assert told == [f"n1: setup: `{FAILS}` ended with exit code 9: no such wheel; once more on the same machine"]


def test_a_secret_that_a_failed_setup_wrote_is_hidden_before_its_line_is_cut(home, code, package):
    told, setup = [], f"echo {'x' * 280}; printf '%s' {'x' * 280}$TOKEN; exit 3"
    wanted = job(code, setup=setup, env=(("TOKEN", "s3cret-" * 8),))
    hide = lambda text: text.replace("s3cret-" * 8, "*" * 56)  # noqa: E731
    with pytest.raises(SetupFailed) as caught:
        fit(HereHost(home), package, wanted, clock=PassingClock(), story=told.append, hide=hide)
    said = "".join([*told, caught.value.message, caught.value.shown, caught.value.log])
    assert "x" * 280 + "*" in said
    assert "s3cret" not in said


def test_a_setup_that_fails_once_begins_afresh_on_the_same_machine(home, code, package):
    clock = PassingClock((code / "mended").touch)
    assert fit(HereHost(home), package, job(code, setup=SETUP), clock=clock).changed == ("package", "agent", "setup")
    assert ((code / "tries").read_text(), clock.waits) == ("try\ntry\n", [5.0])


def test_a_setup_that_fails_by_one_command_and_then_by_another_may_be_the_machines_fault(home, code, package):
    setup = "rm mended\nfalse"
    with pytest.raises(RemoteCommandFailed) as caught:
        fit(HereHost(home), package, job(code, setup=setup), clock=PassingClock((code / "mended").touch))
    assert caught.value.message.startswith("n1: setup: `false` ended with exit code 1:")


@pytest.mark.parametrize(
    ("setup", "named"),
    [
        ("true\npip install \\\n  nothing.of.this.name --no-index", "pip install nothing.of.this.name --no-index"),
        ("true && false", "true && false"),
        ("f() {\n  false\n}\necho a\nf\n", "f"),
        ("cat <<E\nfalse\nE\nfalse", "cat <<E false E false"),
        ("echo 'a\nb'\nfalse # at last", "false # at last"),
        ("cd /\nunset PATH\nset -C\n[ $PWD = / ]\n[ -n '' ]", "[ -n '' ]"),
        ("echo a\nif true; then", "echo a if true; then"),
        ("true\n[ 'a\x0cb' = \"$(printf 'a\\fb')\" ]\nfalse", "false"),  # a form feed ends no line of a shell's
    ],
)
def test_the_command_of_a_setup_that_failed_is_named(home, code, package, setup, named):
    with pytest.raises(SetupFailed) as caught:
        fit(HereHost(home), package, job(code, setup=setup), clock=PassingClock())
    assert caught.value.message.startswith(f"setup: `{named}` ended with exit code ")


def test_two_nodes_that_share_their_layers_run_setup_once(tmp_path, code, package):
    layers = str(tmp_path / "layers")
    homes = [tmp_path / "h1", tmp_path / "h2"]
    results = []

    def work(home):
        home.mkdir()
        wanted = job(code, setup="sleep 0.5; echo run >>runs")
        results.append(fit(HereHost(home, GPUCLOUD_LAYERS=layers), package, wanted).python)

    threads = [threading.Thread(target=work, args=(home,)) for home in homes]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for home in homes:
            AgentNode(home, Path()).destroy()
    assert len(results) == 2
    assert results[0] == results[1]
    assert (code / "runs").read_text() == "run\n"


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """Return an interpreter that has pip and nothing else, as a fresh machine's; jobs build their layers beside it."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return str(folder / "bin" / "python")


@pytest.fixture
def wheels(tmp_path):
    """Return the job's environment in which pip knows no place but a folder with a boto3 1.99."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    _wheel(folder / "boto3-1.99.0-py3-none-any.whl", "boto3", "1.99.0")
    return (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(folder)))


@pytest.mark.parametrize("setup", [None, "echo run >>runs"])
def test_a_store_in_s3_gives_the_jobs_python_boto3_where_it_lacks_it(home, code, package, bare_python, wheels, setup):
    host = HereHost(home, GPUCLOUD_PYTHON=bare_python)
    wanted = job(code, run="./train", setup=setup, env=wheels)
    done = fit(host, package, wanted, store_url="s3://b/p")
    assert "setup" in done.changed
    found = subprocess.run([done.python, "-c", "import boto3; print(boto3.__file__)"], capture_output=True, text=True)
    assert found.stdout.startswith(str(Path(done.python).parent.parent))
    assert fit(host, package, wanted, store_url="s3://b/p").changed == ()
    assert (code / "runs").exists() == (setup is not None)


def test_a_store_elsewhere_asks_for_no_boto3_and_neither_does_a_python_that_has_it(home, code, package, bare_python):
    bare = HereHost(home, GPUCLOUD_PYTHON=bare_python)
    assert fit(bare, package, job(code, run="./train")).python == bare_python
    assert fit(HereHost(home), package, job(code), store_url="s3://b/p").python == sys.executable


def test_an_s3_job_without_a_way_to_boto3_ends_with_one_clear_error(home, code, package, bare_python, tmp_path):
    host = HereHost(home, GPUCLOUD_PYTHON=bare_python)
    nowhere = (("UV_OFFLINE", "1"), ("UV_CACHE_DIR", str(tmp_path / "cache")))
    with pytest.raises(NodeError, match=r"boto3 was not found in the cache") as caught:
        fit(host, package, job(code, run="./train", env=nowhere), store_url="s3://b/p")
    assert caught.value.hint == (
        "let the nodes reach PyPI, or take an image whose Python has boto3>=1.36: the store in S3 needs it"
    )


def test_the_agent_is_told_how_to_end_its_node_and_to_leave_the_cloud_a_minute_for_it(home, code, package):
    host = HereHost(home)
    fit(host, package, job(code), power_off=("sudo", "shutdown", "-h", "now"))
    started = next(argv for argv in host.commands if "agent" in argv)
    assert started[-7:] == ("--power-off-after", "60", "--power-off", "sudo", "shutdown", "-h", "now")


def test_other_requirements_are_another_layer(home, code, package):
    host = HereHost(home)
    wanted = job(code, setup="cat requirements.txt")
    first = fit(host, package, wanted).python
    (code / "requirements.txt").write_text("numpy>=1\n")
    assert fit(host, package, wanted).python != first


def test_a_job_that_asks_for_a_gpu_is_refused_by_a_node_without_one(home, code, package):
    with pytest.raises(GateRefused, match="n1: 0 GPUs, 1 expected"):
        fit(HereHost(home), package, job(code, resources=Resources(gpu=("A100",))))


def test_a_driver_that_does_not_answer_is_named(home, code, package, tmp_path):
    _stand_in_nvidia_smi(tmp_path, "echo couldn\\'t communicate with the NVIDIA driver; exit 9")
    host = HereHost(home, PATH=f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(NodeError, match="exit code 9: couldn't communicate with the NVIDIA driver"):
        fit(host, package, job(code))


def test_the_devices_of_a_stand_in_nvidia_smi_are_in_the_lock_record(home, code, package, tmp_path):
    _stand_in_nvidia_smi(tmp_path, f"cat {RECORDED}")
    host = HereHost(home, PATH=f"{tmp_path}:{os.environ['PATH']}")
    wanted = job(code, run="./train", resources=Resources(gpus=2, gpu=("H200",)), gate=GatePolicy.QUICK)
    done = fit(host, package, wanted)
    assert done.changed == ("package", "agent", "gate")
    assert fit(host, package, wanted).changed == ()
    assert done.lock["gpus"] == [{"name": "NVIDIA H200", "memory_mib": 143771, "driver": "580.159.04"}] * 4
    assert done.findings == ()


def test_a_torch_for_the_cpu_will_do_on_an_emulated_machine_which_says_so_at_its_gate(home, code, package, tmp_path):
    _stand_in_nvidia_smi(tmp_path, f"cat {RECORDED}")
    host = HereHost(home, PATH=f"{tmp_path}:{os.environ['PATH']}", GPUCLOUD_STAND_IN_GPUS="1")
    done = fit(host, package, job(code, run="train.py", resources=Resources(gpus=4, gpu=("H200",))))
    assert done.changed == ("package", "agent", "gate")
    (said,) = [one for one in done.findings if "clock" not in one and "disk" not in one]
    assert said == (
        "its GPUs are stand-ins, and nothing was computed on them (it is an emulated machine: the job runs on the CPU)"
    )


def test_a_torch_for_the_cpu_is_refused_where_a_stand_in_nvidia_smi_shows_gpus_that_the_job_asked_for(
    home, code, package, tmp_path
):
    _stand_in_nvidia_smi(tmp_path, f"cat {RECORDED}")
    host = HereHost(home, PATH=f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(
        NodeError, match=r"torch 2\.\d+\.\d+\+cpu is built for the CPU, and the node has NVIDIA GPUs"
    ) as caught:
        fit(host, package, job(code, resources=Resources(gpus=2, gpu=("H200",))))
    assert caught.value.hint == "setup: uv pip install --reinstall torch --torch-backend auto"
    told = fit(host, package, job(code)).findings
    assert [finding.endswith("(driver 580.159.04): the job runs on the CPU") for finding in told] == [True]


def test_a_torch_that_setup_installs_and_a_stand_in_driver_is_too_old_for_is_refused_before_the_attempt(
    home, code, package, tmp_path, bare_python
):
    """The torch is a stand-in with a version file as torch writes it."""
    recorded = RECORDED.read_text().replace("580.159.04", "570.172.08")
    (tmp_path / "old.xml").write_text(recorded)
    _stand_in_nvidia_smi(tmp_path, f"cat {tmp_path / 'old.xml'}")
    files = {"torch/version.py": "from typing import Optional\n\ncuda: Optional[str] = '13.0'\n"}
    wheel(tmp_path, "torch", "2.13.0", files=files)
    host = HereHost(home, GPUCLOUD_PYTHON=bare_python, PATH=f"{tmp_path}:/usr/bin:/bin")
    setup = f"pip install --no-index {tmp_path}/torch-2.13.0-py3-none-any.whl"
    wanted = job(code, setup=setup, resources=Resources(gpus=1, gpu=("H200",)), env=(("PIP_NO_INDEX", "1"),))
    with pytest.raises(NodeError) as caught:
        fit(host, package, wanted)
    assert caught.value.message == (
        "torch 2.13.0 is built for CUDA 13.0, which needs driver 580.65.06; the node has 570.172.08"
    )
    assert caught.value.hint == "setup: uv pip install torch --torch-backend auto"


def test_a_node_whose_stand_in_gpus_are_not_those_paid_for_is_refused_each_time(home, code, package, tmp_path):
    _stand_in_nvidia_smi(tmp_path, f"cat {RECORDED}")
    host = HereHost(home, PATH=f"{tmp_path}:{os.environ['PATH']}")
    wanted = job(code, run="./train", resources=Resources(gpus=2, gpu=("A100",)), gate=GatePolicy.QUICK)
    for _ in range(2):
        with pytest.raises(GateRefused, match="n1: GPU 0: it is a NVIDIA H200, A100 expected"):
            fit(host, package, wanted)


def test_a_node_without_python_is_named_with_a_hint(home, code, package):
    with pytest.raises(NodeError, match="no python3 on the node") as caught:
        fit(HereHost(home, GPUCLOUD_PYTHON="/no/python"), package, job(code))
    assert "GPUCLOUD_PYTHON" in caught.value.hint


def _stand_in_nvidia_smi(folder, script):
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def _wheel(path, name="greeter", version="1"):
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": "def main():\n    print('hello')\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\ngreet = {name}:main\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"]))
