"""What was probably meant: scripts, GPUs, sums, logins and regions."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpucloud.adapters.aws.faults import CODES
from gpucloud.adapters.aws.prices.catalog import load
from gpucloud.adapters.aws.session import partition_of, require_region
from gpucloud.adapters.home import Home
from gpucloud.adapters.jobfile import read_job
from gpucloud.cli.commands import reaching, setting_up
from gpucloud.cli.faults import sum_of
from gpucloud.domain.errors import JobFileError, PlanRefused, UsageError
from gpucloud.domain.job.spec import AwsChoices, Cloud, Job, OwnHost, Resources, SshChoices
from gpucloud.domain.market.plan import make_plan
from gpucloud.domain.money.budget import PrepaidRule
from gpucloud.wiring import Gpucloud
from tests.fakes.market import NOW


@pytest.fixture
def gpucloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gpucloud:
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    return Gpucloud(Home(tmp_path))


def test_a_script_of_a_similar_name_in_the_same_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").touch()
    file = tmp_path / "gpucloud.yaml"
    file.write_text("name: a\nrun: src/trian.py\nbudget: 1 USD\n")
    with pytest.raises(
        JobFileError, match=r'no script "src/trian.py" in the code folder \(did you mean "src/train.py"\?'
    ):
        read_job(file)


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("n--fol-der", "n-fol-der"),
        ("My  Folder", "my-folder"),
        ("__x__y__", "x-y"),
        ("---", "job"),
        ("a" * 39 + "--b", "a" * 39),
    ],
)
def test_a_folders_name_becomes_a_jobs_without_dashes_in_a_row(folder: str, name: str) -> None:
    assert setting_up._name_of(Path("/work") / folder) == name


def test_ssh_where_access_on_aws_is_meant_is_told_its_key(tmp_path: Path) -> None:
    file = tmp_path / "gpucloud.yaml"
    for more, hint in (
        ("ssh: private", "did you mean `aws: {access: private}`?"),
        ("aws: {ssh: private}", 'did you mean "access"?'),
    ):
        file.write_text(f"name: a\nrun: echo\nbudget: 1 USD\ncloud: aws\n{more}\n")
        with pytest.raises(JobFileError) as refused:
            read_job(file)
        assert [one.hint for one in refused.value.problems] == [hint]


def test_a_gpu_that_nobody_has_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="the catalog has no GPU 'h1000'") as refused:
        load().fitting(Resources(gpu=("h1000",)))
    assert refused.value.hint == "did you mean H100?"
    assert load().fitting(Resources(gpu=("h1000", "H100")))


def test_a_gpu_is_meant_in_whatever_case_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    file = tmp_path / "gpucloud.yaml"
    file.write_text("name: a\nrun: train.py\nbudget: 1 USD\nresources: {gpu: [h100, rtx pro 6000, A1000]}\n")
    assert read_job(file).resources.gpu == ("H100", "RTX PRO 6000", "A1000")


def test_on_this_machine_too_a_gpu_that_nobody_has_is_refused_with_the_nearest(tmp_path: Path) -> None:
    asked = Resources(gpu=("H1000",))
    job = Job(name="a", run="train.py", budget_usd=Decimal(1), source=tmp_path, code=tmp_path, resources=asked)
    with pytest.raises(PlanRefused, match="no machine has 1 worker a node, market spot, GPU H1000") as refused:
        make_plan(job, (), NOW, PrepaidRule())
    assert (refused.value.hint or "").startswith("did you mean H100?")
    with pytest.raises(PlanRefused, match="GPU H100: this machine has no GPUs, and nodes here are processes"):
        make_plan(replace(job, resources=Resources(gpu=("H100",))), (), NOW, PrepaidRule())


_NO_REGION = "us-eats-1 is no AWS region"
_NEAREST = "did you mean us-east-1? if AWS has opened it since: gpucloud catalog refresh --region us-eats-1"


@pytest.mark.parametrize(
    ("written", "place"),
    [("us-eats-1", "5:22: resources.regions"), ("[us-east-1, us-eats-1]", "5:34: resources.regions[1]")],
)
def test_a_region_that_is_none_is_refused_where_it_stands(gpucloud: Gpucloud, written: str, place: str) -> None:
    file = gpucloud.home.root / "gpucloud.yaml"
    file.write_text(f"name: a\nrun: echo\nbudget: 1 USD\ncloud: aws\nresources: {{regions: {written}}}\n")
    with pytest.raises(JobFileError) as refused:
        gpucloud.read_job(file)
    assert [str(one) for one in refused.value.problems] == [f"{file}:{place}: {_NO_REGION} ({_NEAREST})"]
    assert read_job(file).resources.regions  # by whoever has no catalog


@pytest.mark.parametrize("region", [*load().regions, "mx-central-1", "ap-southeast-7"])
def test_every_region_of_the_catalog_and_of_botocore_is_one(region: str) -> None:
    require_region(region, load().regions)


def test_a_region_that_the_catalog_was_refreshed_for_is_one() -> None:
    with pytest.raises(UsageError):
        require_region("xa-north-1")
    require_region("xa-north-1", ("xa-north-1",))
    assert partition_of("us-north-7", ("us-north-7",)) == "aws"


def test_the_users_own_region_is_refused_by_who_names_it(gpucloud: Gpucloud, monkeypatch: pytest.MonkeyPatch) -> None:
    root = gpucloud.home.root
    job = Job(name="a", run="echo", budget_usd=Decimal(1), source=root, code=root, cloud=Cloud.AWS)
    for variable in ("AWS_DEFAULT_REGION", "AWS_REGION"):
        monkeypatch.setenv(variable, "us-eats-1")
        with pytest.raises(UsageError, match=f"{variable}: {_NO_REGION}") as refused:
            Gpucloud(gpucloud.home).require_regions(job)
        assert refused.value.hint == _NEAREST
    with pytest.raises(UsageError, match=f"^{_NO_REGION}"):
        gpucloud.aws(AwsChoices(), Resources()).require_regions(("us-eats-1",))
    here = replace(job, resources=Resources(regions=("eu-west-1",)))
    gpucloud.require_regions(here)  # the job's own count alone
    gpucloud.require_regions(replace(job, cloud=Cloud.LOCAL))


@pytest.mark.parametrize(
    ("hosts", "said", "hint"),
    [
        (0, "3 nodes wanted, and the job file has no hosts", "ssh: {hosts: [user@address]}"),
        (2, "3 nodes wanted, and the job file has 2 hosts", "ssh: {hosts: [user@address]}, or `nodes: 2`"),
    ],
)
def test_fewer_nodes_are_advised_where_there_are_hosts_for_some(
    tmp_path: Path, hosts: int, said: str, hint: str
) -> None:
    own = SshChoices(hosts=tuple(OwnHost(address=f"gpu{number}") for number in range(hosts)))
    job = Job(name="a", run="echo", budget_usd=Decimal(1), source=tmp_path, code=tmp_path, cloud=Cloud.SSH, ssh=own)
    with pytest.raises(PlanRefused) as refused:
        make_plan(replace(job, resources=Resources(nodes=3)), (), NOW, PrepaidRule())
    assert (refused.value.message, refused.value.hint) == (said, hint)


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
        (
            f".gpucloud/jobs/rs-1a2b3c4d/gpu1/code/{'0a' * 32}/train.py",
            "paths start in the code folder: gpucloud cp rs:train.py .",
        ),
        (".gpucloud/code/", "paths start in the code folder: gpucloud cp rs:. ."),
        ("trian.py", "did you mean rs:train.py?"),
    ],
)
def test_a_path_from_a_nodes_home_is_answered_with_the_one_from_the_code(path: str, hint: str) -> None:
    found: Any = SimpleNamespace(missing=[(path, "train.py")], asked_folders=[], base="code")
    with pytest.raises(UsageError, match=f"there is no {path} on the node") as refused:
        reaching._refuse(found, reaching._There(job="rs", path=path), recursive=False)
    assert refused.value.hint == hint
