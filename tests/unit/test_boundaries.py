"""What runs on a bare node, and what the CLI starts with, imports no more than it may."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import gpucloud
from gpucloud.adapters.home import Home
from tests.bench import bench_cost, bench_shape

PACKAGE = Path(gpucloud.__file__).parent
# Refuses every module that is neither in the standard library nor ours.
BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top != "gpucloud" and top not in sys.stdlib_module_names:
            raise ImportError("third party: " + name)
sys.meta_path.insert(0, Blocker())
"""
IMPORT = "import importlib; [importlib.import_module(name) for name in sys.argv[1:]]"
HEAVY = ("torch", "numpy", "boto3", "botocore", "paramiko", "python_terraform", "matplotlib", "cryptography")
OF_SUPERVISING = (
    "http.server",
    "gpucloud.adapters.local.node",
    "gpucloud.domain.market.plan",
    "gpucloud.domain.node.bootstrap.wanted",
    "gpucloud.domain.node.gate.report",
    "gpucloud.usecases.machines",
    "gpucloud.usecases.services",
)
"""What renting, starting and supervising take; looking takes none of it."""


def modules(*places: str) -> list[str]:
    files = [file for place in places for file in sorted(PACKAGE.glob(place))]
    names = [".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts) for file in files]
    return [name.removesuffix(".__init__") for name in names]


def run(code: str, *arguments: str, isolated: bool = True) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, *(["-S"] if isolated else []), "-c", code, *arguments]
    return subprocess.run(argv, cwd=PACKAGE.parent, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "places",
    [
        ("__init__.py", "system/*.py"),
        ("domain/**/*.py",),
        ("ports.py",),
        ("usecases/**/*.py",),
        ("agent/**/*.py",),
        (
            "wiring/__init__.py",
            "wiring/root.py",
            "wiring/found.py",
            "wiring/jobs.py",
            "wiring/clouds.py",
        ),
    ],
    ids=lambda places: places[-1],
)
def test_it_imports_the_standard_library_and_gpucloud_only(places: tuple[str, ...]) -> None:
    names = modules(*places)
    assert names
    done = run(BLOCKER + IMPORT, *names)
    assert done.returncode == 0, done.stderr


def test_the_blocker_blocks() -> None:
    done = run(BLOCKER + IMPORT, "yaml", isolated=False)
    assert "ImportError: third party: yaml" in done.stderr


def test_the_package_itself_imports_nothing() -> None:
    done = run("import sys; before = set(sys.modules); import gpucloud; print(sorted(set(sys.modules) - before))")
    assert done.stdout == "['gpucloud']\n", done.stderr


@pytest.mark.parametrize("words", [("--help",), ("cost", "long"), ("status", "long")], ids=" ".join)
def test_commands_that_only_look_import_nothing_heavy(words: tuple[str, ...], tmp_path: Path) -> None:
    bench_cost.make_job(Home(tmp_path), attempts=1)
    unwanted = HEAVY + OF_SUPERVISING
    code = (
        "import atexit, os, runpy, sys\n"
        f"atexit.register(lambda: print('heavy:', [name for name in {unwanted!r} if name in sys.modules]))\n"
        f"os.environ['GPUCLOUD_HOME'] = {str(tmp_path)!r}\n"
        f"sys.argv = {['gpucloud', *words]!r}\n"
        "runpy.run_module('gpucloud', run_name='__main__')\n"
    )
    done = run(code, isolated=False)
    assert done.returncode == 0, done.stderr
    assert "heavy: []" in done.stdout


@pytest.mark.parametrize("module", ["gpucloud.adapters.jobfile"])
def test_reading_a_job_file_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert run(code, isolated=False).stdout == "[]\n"


def test_reading_a_signed_order_does_without_an_ssh_client() -> None:
    code = "import sys, gpucloud.adapters.keys; print('paramiko' in sys.modules)"
    assert run(code, isolated=False).stdout == "False\n"


@pytest.mark.parametrize("module", ["gpucloud.agent.facts", "gpucloud.agent.daemon"])
def test_what_a_new_machine_waits_for_does_not_read_how_jobs_are_launched_or_markets_judged(module: str) -> None:
    spared = (
        "gpucloud.domain.node.launch",
        "gpucloud.domain.node.member",
        "gpucloud.domain.checkpoint.directory",
        "gpucloud.domain.checkpoint.layouts",
        "gpucloud.domain.market.policy",
    )
    code = f"import sys, gpucloud.agent.__main__, {module}; print([name for name in {spared!r} if name in sys.modules])"
    assert run(code).stdout == "[]\n"


def test_an_agent_starts_without_what_facts_are_gathered_by() -> None:
    code = "import sys, gpucloud.agent.__main__, gpucloud.agent.daemon; print('gpucloud.agent.facts' in sys.modules)"
    assert run(code).stdout == "False\n"


def test_the_licence_is_there() -> None:
    assert "Apache License" in (PACKAGE.parent / "LICENSE").read_text()


def test_no_module_is_longer_than_a_chapter_and_no_more_are_there_than_can_be_known() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    lines = {str(file.relative_to(PACKAGE)): file.read_text(encoding="utf-8").count("\n") for file in files}
    assert {name: count for name, count in lines.items() if count > bench_shape.MOST_LINES} == {}
    assert len(files) <= bench_shape.MOST_FILES
