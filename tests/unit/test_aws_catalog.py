"""The catalog of GPU machines: what is in the package, what is unknown, and how it is made new."""

from __future__ import annotations

import json
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from botocore.stub import ANY, Stubber

from gpucloud.adapters.aws.account.quotas import family_of
from gpucloud.adapters.aws.prices.catalog import load, read, written
from gpucloud.adapters.aws.prices.refresh import refresh
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.catalog import Catalog, ListPrice, Machine, PriceList
from gpucloud.domain.errors import ProvisionError, UsageError
from gpucloud.domain.job import Resources

NOW = datetime(2026, 11, 21, 12, tzinfo=timezone.utc)
MACHINES = {
    "g4dn.xlarge": Machine(name="g4dn.xlarge", gpu="T4", gpus=1, vram_gib=16, vcpus=4, memory_gib=16, efa=0),
    "g5.xlarge": Machine(name="g5.xlarge", gpu="A10G", gpus=1, vram_gib=24, vcpus=4, memory_gib=16, efa=0),
    "g6e.48xlarge": Machine(name="g6e.48xlarge", gpu="L40S", gpus=8, vram_gib=48, vcpus=192, memory_gib=1536, efa=4),
    "gr6.4xlarge": Machine(name="gr6.4xlarge", gpu="L4", gpus=1, vram_gib=24, vcpus=16, memory_gib=128, efa=0),
    "p3.16xlarge": Machine(name="p3.16xlarge", gpu="V100", gpus=8, vram_gib=16, vcpus=64, memory_gib=488, efa=0),
    "p4d.24xlarge": Machine(name="p4d.24xlarge", gpu="A100", gpus=8, vram_gib=40, vcpus=96, memory_gib=1152, efa=4),
    "p5.48xlarge": Machine(name="p5.48xlarge", gpu="H100", gpus=8, vram_gib=80, vcpus=192, memory_gib=2048, efa=32),
    "p5en.48xlarge": Machine(
        name="p5en.48xlarge", gpu="H200", gpus=8, vram_gib=141, vcpus=192, memory_gib=2048, efa=16
    ),
}


@pytest.mark.parametrize("machine", MACHINES.values(), ids=lambda machine: machine.name)
def test_machines_are_as_aws_describes_them(machine: Machine):
    assert load().machine(machine.name) == machine


def test_every_machine_has_a_price_in_us_east_1():
    catalog = load()
    assert len(catalog.machines) == 44
    assert set(catalog.prices["us-east-1"].usd_per_hour) == set(catalog.machines)
    assert {machine.gpu for machine in catalog.machines.values()} == {
        "T4", "A10G", "L4", "L40S", "V100", "A100", "H100", "H200", "B200",
    }  # fmt: skip


def test_a_listed_price_carries_its_date():
    assert load().price("g5.xlarge", "us-east-1") == ListPrice(
        usd_per_hour=Decimal("1.006"), as_of=date(2026, 1, 19), bound=False
    )


def test_a_region_without_a_price_has_twice_the_highest_known_one_as_bound():
    # São Paulo, the dearest that is known, asks 1.7 times the price of us-east-1.
    assert load().price("g5.xlarge", "sa-east-1") == ListPrice(
        usd_per_hour=Decimal("2.012"), as_of=date(2026, 1, 19), bound=True
    )


def test_a_machine_that_is_not_in_the_catalog_is_said():
    with pytest.raises(UsageError, match=r"g9\.xlarge is not in the catalog"):
        load().price("g9.xlarge", "us-east-1")
    with pytest.raises(UsageError, match=r"g9\.xlarge is not in the catalog"):
        load().machine("g9.xlarge")


def test_its_age_is_that_of_the_regions_prices():
    catalog = Catalog(
        machines={},
        prices={
            "us-east-1": PriceList(as_of=date(2026, 11, 20), usd_per_hour={}),
            "eu-west-1": PriceList(as_of=date(2026, 1, 21), usd_per_hour={}),
        },
    )
    assert catalog.age(NOW, "us-east-1") == timedelta(days=1, hours=12)
    assert catalog.age(NOW) == timedelta(days=304, hours=12)
    assert catalog.age(NOW, "sa-east-1") == timedelta(days=304, hours=12)


def test_machines_that_fit_have_enough_gpus_of_the_model():
    wanted = Resources(gpu=("A100", "H100"), gpus=8)
    assert [machine.name for machine in load().fitting(wanted)] == ["p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge"]
    assert [machine.name for machine in load().fitting(Resources(types=("g5.xlarge",), vram_gib=24))] == ["g5.xlarge"]
    assert load().fitting(Resources(types=("g5.xlarge",), vram_gib=40)) == ()


def test_a_catalog_that_was_written_is_read_back_the_same():
    catalog = load()
    assert read(written(catalog)) == catalog


def test_a_damaged_file_is_said_with_the_command_that_makes_it_new(tmp_path: Path):
    file = tmp_path / "catalog.json"
    file.write_text('{"types": {}}')
    with pytest.raises(UsageError, match="is damaged") as caught:
        load(file)
    assert caught.value.hint == "gpucloud catalog refresh"


def test_an_older_file_does_not_undo_the_packages_prices(tmp_path: Path):
    old = PriceList(as_of=date(2025, 1, 1), usd_per_hour={"g5.xlarge": Decimal(9)})
    file = tmp_path / "catalog.json"
    file.write_text(written(Catalog(machines={}, prices={"us-east-1": old})))
    assert load(file).price("g5.xlarge", "us-east-1").usd_per_hour == Decimal("1.006")


@pytest.mark.parametrize(
    ("instance_type", "family"),
    [
        ("g4dn.xlarge", "g"), ("gr6.4xlarge", "g"), ("vt1.3xlarge", "g"), ("p3.2xlarge", "p"), ("p4de.24xlarge", "p"),
        ("p5en.48xlarge", "p5"), ("p6-b200.48xlarge", "p6"), ("m5.large", "standard"), ("t3.micro", "standard"),
        ("im4gn.large", "standard"), ("inf2.xlarge", "inf"), ("trn1.32xlarge", "trn"), ("x1e.xlarge", "x"),
    ],
)  # fmt: skip
def test_a_type_counts_against_its_familys_quota(instance_type: str, family: str):
    assert family_of(instance_type) == family


# --- refresh ---


def described(name: str, gpu: str, count: int, mib: int, maker: str = "NVIDIA") -> dict[str, Any]:
    return {
        "InstanceType": name,
        "GpuInfo": {"Gpus": [{"Name": gpu, "Manufacturer": maker, "Count": count, "MemoryInfo": {"SizeInMiB": mib}}]},
        "VCpuInfo": {"DefaultVCpus": 8},
        "MemoryInfo": {"SizeInMiB": 32768},
        "NetworkInfo": {"EfaInfo": {"MaximumEfaInterfaces": 1}},
    }


def product(name: str, usd: str, unit: str = "Hrs") -> str:
    dimension = {"unit": unit, "pricePerUnit": {"USD": usd}}
    return json.dumps(
        {
            "product": {"attributes": {"instanceType": name}},
            "terms": {"OnDemand": {"T": {"priceDimensions": {"D": dimension}}}},
        }
    )


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Aws:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    return Aws(region="us-east-1")


def answers(aws: Aws, kinds: list[dict[str, Any]], products: list[str]) -> tuple[Stubber, Stubber]:
    ec2, pricing = Stubber(aws.client("ec2", "eu-west-3")), Stubber(aws.client("pricing", "us-east-1"))
    ec2.add_response("describe_instance_types", {"InstanceTypes": kinds}, {"Filters": ANY})
    pricing.add_response("get_products", {"PriceList": products}, {"ServiceCode": "AmazonEC2", "Filters": ANY})
    return ec2, pricing


def test_a_refresh_writes_machines_and_prices_of_the_region(aws: Aws, tmp_path: Path):
    kinds = [
        described("g9.2xlarge", "L9", 1, 22888),
        described("g6f.xlarge", "L4", 0, 2861),
        described("g4ad.xlarge", "Radeon", 1, 8192, maker="AMD"),
        {"InstanceType": "m5.large"},
    ]
    products = [product("g9.2xlarge", "1.5000000000"), product("m5.large", "0.1"), product("g9.2xlarge", "0.0")]
    ec2, pricing = answers(aws, kinds, products)
    file = tmp_path / "home" / "catalog.json"
    with ec2, pricing:
        catalog = refresh(aws, "eu-west-3", file, now=lambda: NOW)
    assert catalog.machine("g9.2xlarge") == Machine(
        name="g9.2xlarge", gpu="L9", gpus=1, vram_gib=24, vcpus=8, memory_gib=32, efa=1
    )
    assert catalog.price("g9.2xlarge", "eu-west-3") == ListPrice(
        usd_per_hour=Decimal("1.5000000000"), as_of=date(2026, 11, 21), bound=False
    )
    assert catalog.age(NOW, "eu-west-3") == timedelta(hours=12)
    assert load(file) == catalog
    assert set(read(file.read_text()).prices) == {"eu-west-3"}


def test_a_refresh_of_another_region_keeps_the_first(aws: Aws, tmp_path: Path):
    file = tmp_path / "catalog.json"
    first = PriceList(as_of=date(2026, 11, 1), usd_per_hour={"g5.xlarge": Decimal(2)})
    file.write_text(written(Catalog(machines={}, prices={"ap-south-1": first})))
    ec2, pricing = answers(aws, [described("g5.xlarge", "A10G", 1, 22888)], [product("g5.xlarge", "1.2")])
    with ec2, pricing:
        catalog = refresh(aws, "eu-west-3", file, now=lambda: NOW)
    assert catalog.price("g5.xlarge", "ap-south-1").usd_per_hour == Decimal(2)
    assert catalog.price("g5.xlarge", "eu-west-3").usd_per_hour == Decimal("1.2")


def test_a_refresh_that_finds_nothing_leaves_the_file_as_it_was(aws: Aws, tmp_path: Path):
    file = tmp_path / "catalog.json"
    ec2, pricing = answers(aws, [], [])
    with ec2, pricing, pytest.raises(ProvisionError, match="lists no price of a GPU machine in eu-west-3"):
        refresh(aws, "eu-west-3", file, now=lambda: NOW)
    assert not file.exists()


def test_a_refresh_that_may_not_read_prices_names_the_permission(aws: Aws, tmp_path: Path):
    ec2, pricing = Stubber(aws.client("ec2", "eu-west-3")), Stubber(aws.client("pricing", "us-east-1"))
    ec2.add_response("describe_instance_types", {"InstanceTypes": [described("g5.xlarge", "A10G", 1, 22888)]})
    pricing.add_client_error(
        "get_products", "AccessDeniedException", "User: x is not authorized to perform: pricing:GetProducts"
    )
    with ec2, pricing, pytest.raises(ProvisionError, match="this identity may not do that: pricing:GetProducts"):
        refresh(aws, "eu-west-3", tmp_path / "catalog.json", now=lambda: NOW)
