"""What was probably meant: scripts, GPUs, sums, logins and regions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpucloud.adapters.aws.faults import CODES
from gpucloud.adapters.aws.prices.catalog import load
from gpucloud.adapters.jobfile import read_job
from gpucloud.cli.commands import reaching
from gpucloud.cli.target import sum_of
from gpucloud.domain.errors import JobFileError, UsageError
from gpucloud.domain.job.spec import Resources


def test_a_script_of_a_similar_name_in_the_same_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").touch()
    file = tmp_path / "gpucloud.yaml"
    file.write_text("name: a\nrun: src/trian.py\nbudget: 1 USD\n")
    with pytest.raises(
        JobFileError, match=r'no script "src/trian.py" in the code folder \(did you mean "src/train.py"\?'
    ):
        read_job(file)


def test_a_gpu_that_nobody_has_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="the catalog has no GPU 'h1000'") as refused:
        load().fitting(Resources(gpu=("h1000",)))
    assert refused.value.hint == "did you mean H100?"
    assert load().fitting(Resources(gpu=("h1000", "H100")))


def test_a_bare_number_is_asked_for_with_its_unit() -> None:
    with pytest.raises(UsageError) as refused:
        sum_of("5")
    assert refused.value.hint == "did you mean --budget '5 USD'?"


def test_who_is_not_logged_in_hears_the_ways_to_do_it() -> None:
    assert CODES["NoCredentialsError"].step == "log in: `aws sso login`, `aws configure`, or AWS_PROFILE=…"


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        (".gpucloud/code/train.py", "paths start in the code folder: gpucloud cp rs:train.py ."),
        (f"~/.gpucloud/code/{'0a' * 32}/src/net.py", "paths start in the code folder: gpucloud cp rs:src/net.py ."),
        (".gpucloud/code/", "paths start in the code folder: gpucloud cp rs:. ."),
        ("trian.py", "did you mean rs:train.py?"),
    ],
)
def test_a_path_from_a_nodes_home_is_answered_with_the_one_from_the_code(path: str, hint: str) -> None:
    found: Any = SimpleNamespace(missing=[(path, "train.py")], asked_folders=[], base="code")
    with pytest.raises(UsageError, match=f"there is no {path} on the node") as refused:
        reaching._refuse(found, reaching._There(job="rs", path=path), recursive=False)
    assert refused.value.hint == hint
