"""The AWS provider is taken by the hashes that gpucloud brings along, wherever it comes from."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from pathlib import Path

import pytest

from gpucloud.adapters.home import bundled
from gpucloud.adapters.terraform.program import environment, find_terraform
from gpucloud.adapters.terraform.runner import Runner
from gpucloud.adapters.terraform.workfolder import WorkFolder
from gpucloud.domain.errors import ToolMissing
from tests.lab.aws.plugins import plugin_folder

LOCK = ".terraform.lock.hcl"
MODULES = ("base", "cluster")
SYSTEM = "darwin" if sys.platform == "darwin" else "linux"
PLATFORM = f"{SYSTEM}_{'arm64' if platform.machine() in ('arm64', 'aarch64') else 'amd64'}"
BELOW = f"registry.terraform.io/hashicorp/aws/5.100.0/{PLATFORM}"


def module(folder: Path, name: str = "base") -> Path:
    """A module that needs what the real one needs, and nothing else."""
    folder.mkdir()
    for file in (LOCK, "versions.tf"):
        shutil.copy(bundled("terraform", "aws", name, file), folder)
    (folder / "variables.tf").write_text('variable "region" {\n  type = string\n}\n')
    return folder


def initialise(work: WorkFolder, source: Path, plugins: Path | None) -> None:
    work.fill(source, {}, None)
    program = find_terraform()
    assert program is not None
    fd = os.open(work.path, os.O_RDONLY)
    try:
        runner = Runner(
            program, work.path, env=environment(os.environ), lock_fd=fd, story=lambda _: None, limit_s=120.0
        )
        work.initialise(runner, plugin_dir=str(plugins) if plugins else None, cache=None, story=lambda _: None)
    finally:
        os.close(fd)


def test_every_module_brings_the_same_lock_of_the_version_that_it_asks_for() -> None:
    texts = {bundled("terraform", "aws", name, LOCK).read_text() for name in MODULES}
    assert len(texts) == 1
    (text,) = texts
    (version,) = re.findall(r'version\s+= "([^"]+)"', text)
    for name in MODULES:
        asked = bundled("terraform", "aws", name, "versions.tf").read_text()
        assert re.findall(r'^\s+version\s+= "([^"]+)"', asked, re.MULTILINE) == [version]
    assert len(re.findall(r'"zh:[0-9a-f]{64}"', text)) == 15
    assert len(re.findall(r'"h1:[\w+/]{43}="', text)) == 2


@pytest.mark.parametrize("name", MODULES)
def test_a_provider_of_another_content_is_refused(tmp_path: Path, name: str) -> None:
    planted = tmp_path / "plugins" / BELOW
    planted.mkdir(parents=True)
    (planted / "terraform-provider-aws_v5.100.0_x5").write_text("#!/bin/sh\necho mine\n")
    (planted / "terraform-provider-aws_v5.100.0_x5").chmod(0o755)
    with pytest.raises(ToolMissing, match="doesn't match any of the checksums") as caught:
        initialise(WorkFolder(tmp_path / "work"), module(tmp_path / "module", name), tmp_path / "plugins")
    assert "`terraform providers mirror`" in (caught.value.hint or "")
    assert not (tmp_path / "work" / ".terraform" / "gpucloud-initialised").exists()


def test_a_newer_provider_is_refused_too(tmp_path: Path) -> None:
    planted = tmp_path / "plugins" / BELOW.replace("5.100.0", "5.101.0")
    planted.mkdir(parents=True)
    (planted / "terraform-provider-aws_v5.101.0_x5").touch()
    with pytest.raises(ToolMissing, match=r"version 5\.100\.0 is no longer available"):
        initialise(WorkFolder(tmp_path / "work"), module(tmp_path / "module"), tmp_path / "plugins")


def test_the_real_one_is_taken_and_the_lock_stays_as_it_came(tmp_path: Path) -> None:
    found = plugin_folder()  # without one, the registry's is taken
    plugins = Path(found) if found else None
    source, work = module(tmp_path / "module"), WorkFolder(tmp_path / "work")
    initialise(work, source, plugins)
    assert (work.path / LOCK).read_bytes() == (source / LOCK).read_bytes()
    assert (work.path / ".terraform" / "gpucloud-initialised").exists()

    (work.path / LOCK).write_text("")  # whoever removed it there finds it again
    initialise(work, source, plugins)
    assert (work.path / LOCK).read_bytes() == (source / LOCK).read_bytes()
