"""The catalog of GPU machines: what is in the package, what is unknown, and how it is made new."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from botocore.stub import ANY, Stubber

from gpucloud.adapters.aws.account import family_of
from gpucloud.adapters.aws.prices.asking import machine_of, refresh
from gpucloud.adapters.aws.prices.catalog import load, read, written
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.errors import ProvisionError, UsageError
from gpucloud.domain.job.spec import Access, Resources
from gpucloud.domain.market.catalog import Advice, Band, Catalog, ListPrice, Machine, PriceList, Scores, SpotList, aged
from gpucloud.domain.offer import EfaLayout

NOW = datetime(2026, 11, 21, 12, tzinfo=timezone.utc)
MACHINES = {
    machine.name: machine
    for machine in (
        Machine(name="g4dn.xlarge", gpu="T4", gpus=1, vram_gib=16, vcpus=4, memory_gib=16, efa=0, network_gbps=5,
                burst_gbps=25, nvme_gb=125),
        Machine(name="g5.xlarge", gpu="A10G", gpus=1, vram_gib=24, vcpus=4, memory_gib=16, efa=0, network_gbps=2.5,
                burst_gbps=10, nvme_gb=250),
        Machine(name="g5g.16xlarge", gpu="T4g", gpus=2, vram_gib=16, vcpus=64, memory_gib=128, efa=0, network_gbps=25,
                nvme_gb=0, architecture="arm64"),
        Machine(name="g6.xlarge", gpu="L4", gpus=1, vram_gib=24, vcpus=4, memory_gib=16, efa=0, network_gbps=2.5,
                burst_gbps=10, nvme_gb=250),
        Machine(name="g6e.48xlarge", gpu="L40S", gpus=8, vram_gib=48, vcpus=192, memory_gib=1536, efa=4,
                network_gbps=400, nvme_gb=7600, cards=4),
        Machine(name="g6f.xlarge", gpu="L4", gpus=0, gpu_part=0.125, vram_gib=3, vcpus=4, memory_gib=16, efa=0,
                network_gbps=2.5, burst_gbps=10, nvme_gb=100),
        Machine(name="g7e.48xlarge", gpu="RTX PRO 6000", gpus=8, vram_gib=96, vcpus=192, memory_gib=2048, efa=4,
                network_gbps=1600, nvme_gb=15200, cards=4),
        Machine(name="gr6.4xlarge", gpu="L4", gpus=1, vram_gib=24, vcpus=16, memory_gib=128, efa=0, network_gbps=10,
                burst_gbps=25, nvme_gb=600),
        Machine(name="p3.16xlarge", gpu="V100", gpus=8, vram_gib=16, vcpus=64, memory_gib=488, efa=0, network_gbps=25,
                nvme_gb=0),
        Machine(name="p4d.24xlarge", gpu="A100", gpus=8, vram_gib=40, vcpus=96, memory_gib=1152, efa=4,
                network_gbps=400, nvme_gb=8000, cards=4),
        Machine(name="p5.48xlarge", gpu="H100", gpus=8, vram_gib=80, vcpus=192, memory_gib=2048, efa=32,
                network_gbps=3200, nvme_gb=30400, cards=32),
        Machine(name="p5en.48xlarge", gpu="H200", gpus=8, vram_gib=141, vcpus=192, memory_gib=2048, efa=16,
                network_gbps=3200, nvme_gb=30400, cards=16),
        Machine(name="p6-b300.48xlarge", gpu="B300", gpus=8, vram_gib=268, vcpus=192, memory_gib=4096, efa=16,
                network_gbps=6400, nvme_gb=30400, cards=17),
    )
}  # fmt: skip


@pytest.mark.parametrize("machine", MACHINES.values(), ids=lambda machine: machine.name)
def test_machines_are_as_aws_describes_them(machine: Machine):
    assert load().machine(machine.name) == machine


@pytest.mark.parametrize(
    ("name", "nodes", "layout", "access"),
    [
        ("g5.xlarge", 8, "0", Access.PUBLIC),
        ("g5.12xlarge", 2, "1", Access.PUBLIC),  # its only interface may have an address
        ("p4d.24xlarge", 2, "4", Access.SESSION_MANAGER),
        ("p5en.48xlarge", 2, "16", Access.SESSION_MANAGER),
        ("p6-b300.48xlarge", 2, "16of17", Access.SESSION_MANAGER),  # its first card has none
        ("p6-b300.48xlarge", 1, "0", Access.PUBLIC),  # EFA is of no use alone, and would cost the address
    ],
)
def test_efa_lies_as_the_types_cards_have_it_and_decides_how_ssh_gets_in(
    name: str, nodes: int, layout: str, access: Access
):
    efa = load().machine(name).fabric(nodes)
    assert (str(efa), efa.access(Access.PUBLIC)) == (layout, access)
    assert efa.access(Access.PRIVATE) is Access.PRIVATE


def test_a_type_whose_cards_are_not_known_has_one_for_each_efa_interface():
    assert replace(load().machine("p4d.24xlarge"), cards=1).fabric(2) == EfaLayout(interfaces=4, cards=4)


def test_the_cards_are_read_as_ec2_describes_them():
    kind = described("p9.48xlarge", "B900", 8, 294912)
    kind["NetworkInfo"] = {"MaximumNetworkCards": 17, "EfaInfo": {"MaximumEfaInterfaces": 16}}
    machine = machine_of(kind)
    assert machine is not None
    assert machine.fabric(2) == EfaLayout(interfaces=16, cards=17)


def test_every_machine_has_a_price_in_us_east_1():
    catalog = load()
    assert len(catalog.machines) == 68
    assert set(catalog.prices["us-east-1"].usd_per_hour) == set(catalog.machines)
    assert catalog.prices["us-east-1"].bounds == {"p5e.48xlarge"}
    assert catalog.gpus == (
        "A100", "A10G", "B200", "B300", "H100", "H200", "L4", "L40S", "RTX PRO 4500", "RTX PRO 6000", "T4", "T4g",
        "V100",
    )  # fmt: skip


def test_every_machine_but_three_of_old_is_offered_somewhere():
    catalog = load()
    offered = {name for types in catalog.zones.values() for name in types}
    assert set(catalog.machines) - offered == {"p3.2xlarge", "p3.8xlarge", "p3.16xlarge"}
    assert len(catalog.zones) == 28


def test_every_gpu_has_a_data_sheet():
    assert all(machine.sheet is not None for machine in load().machines.values())


def test_no_type_is_offered_in_more_zones_than_a_region_has():
    # us-east-1 has six of its own, and local zones beside.
    assert max(zones for types in load().zones.values() for zones in types.values()) == 6
    assert load().zones["us-east-1"]["p5.48xlarge"] == 6


def test_the_network_is_the_machines_and_not_the_sum_of_its_cards():
    machines = load().machines
    assert [machines[name].network_gbps for name in ("g6e.48xlarge", "p4d.24xlarge", "p6-b300.48xlarge")] == [
        400, 400, 6400,
    ]  # fmt: skip
    assert max(machine.network_gbps or 0 for machine in machines.values()) == 6400


def test_a_burst_is_not_taken_for_what_the_network_carries():
    machines = load().machines
    assert all(one.burst_gbps > one.network_gbps for one in machines.values() if one.burst_gbps and one.network_gbps)
    assert all(one.network_gbps for one in machines.values())


def test_memory_is_what_a_gpu_is_sold_with():
    catalog = load()
    sold = {one.gpu: one.vram_gib for one in catalog.machines.values() if one.gpus and one.name != "p4de.24xlarge"}
    assert sold == {
        "T4": 16, "T4g": 16, "A10G": 24, "L4": 24, "L40S": 48, "RTX PRO 4500": 32, "RTX PRO 6000": 96, "V100": 32,
        "A100": 40, "H100": 80, "H200": 141, "B200": 179, "B300": 268,
    }  # fmt: skip
    assert catalog.machine("p4de.24xlarge").vram_gib == 80


def test_machines_that_jobs_do_not_run_on_say_why_and_fit_nothing():
    machines = load().machines
    why = {name: machine.why_not for name, machine in machines.items() if machine.why_not}
    assert why == {
        **dict.fromkeys(("g6f.large", "g6f.xlarge", "g6f.2xlarge", "g6f.4xlarge", "gr6f.4xlarge"), "a part of a GPU"),
        **dict.fromkeys(
            ("g5g.xlarge", "g5g.2xlarge", "g5g.4xlarge", "g5g.8xlarge", "g5g.16xlarge", "g5g.metal"), "arm64"
        ),
    }
    assert not any(machines[name].fits(Resources(types=(name,))) for name in why)


def test_nvlink_joins_the_gpus_of_the_p_families():
    joined = {machine.name for machine in load().machines.values() if machine.nvlink}
    assert joined == {
        "p3.8xlarge", "p3.16xlarge", "p3dn.24xlarge", "p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge", "p5e.48xlarge",
        "p5en.48xlarge", "p6-b200.48xlarge", "p6-b300.48xlarge",
    }  # fmt: skip


def test_the_advisors_word_carries_its_date():
    advisor = load().advisor
    assert advisor is not None
    assert advisor.as_of == date(2025, 6, 28)
    assert advisor.of("p4d.24xlarge", "us-west-2") == Advice(saving=53, band=Band.OVER_20)
    assert advisor.of("p5en.48xlarge", "us-west-2") == Advice(saving=63, band=Band.UNDER_5)
    assert advisor.of("g7.2xlarge", "us-west-2") is None


def test_spot_can_be_dearer_than_on_demand():
    advisor = load().advisor
    assert advisor is not None
    savings = {(region, name): one.saving for region, types in advisor.advice.items() for name, one in types.items()}
    assert {key: saving for key, saving in savings.items() if saving <= 0} == {("ca-central-1", "p5.48xlarge"): -62}
    assert max(savings.values()) == 90


def test_a_listed_price_carries_its_date():
    assert load().price("g5.xlarge", "us-east-1") == ListPrice(
        usd_per_hour=Decimal("1.006"), as_of=date(2026, 7, 20), bound=False
    )


def test_a_region_without_a_price_has_twice_the_highest_known_one_as_bound():
    # São Paulo, the dearest that is known, asks 1.7 times the price of us-east-1.
    assert load().price("g5.xlarge", "sa-east-1") == ListPrice(
        usd_per_hour=Decimal("2.012"), as_of=date(2026, 7, 20), bound=True
    )


def test_a_machine_that_is_not_in_the_catalog_is_said():
    with pytest.raises(UsageError, match=r"g9\.xlarge is not in the catalog"):
        load().price("g9.xlarge", "us-east-1")
    with pytest.raises(UsageError, match=r"g9\.xlarge is not in the catalog"):
        load().machine("g9.xlarge")


def test_prices_are_as_old_as_the_oldest_of_the_regions():
    catalog = Catalog(
        machines={},
        prices={
            "us-east-1": PriceList(as_of=date(2026, 11, 20), usd_per_hour={}),
            "eu-west-1": PriceList(as_of=date(2026, 1, 21), usd_per_hour={}),
        },
    )
    assert catalog.priced_on(("us-east-1",)) == date(2026, 11, 20)
    assert catalog.priced_on(("us-east-1", "eu-west-1")) == date(2026, 1, 21)
    assert catalog.priced_on(("sa-east-1",)) == date(2026, 1, 21)


def test_machines_that_fit_have_enough_gpus_of_the_model():
    wanted = Resources(gpu=("A100", "H100"), gpus=8)
    assert [machine.name for machine in load().fitting(wanted)] == ["p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge"]
    assert [machine.name for machine in load().fitting(Resources(types=("g5.xlarge",), vram_gib=24))] == ["g5.xlarge"]
    assert load().fitting(Resources(types=("g5.xlarge",), vram_gib=40)) == ()


def test_a_list_taken_from_another_region_says_so():
    prices = load().prices
    assert {name: one.taken_from for name, one in prices.items()} == {
        "us-east-1": None, "us-east-2": "us-east-1", "us-west-2": "us-east-1",
    }  # fmt: skip
    assert prices["us-west-2"].usd_per_hour == prices["us-east-1"].usd_per_hour


@pytest.mark.parametrize(
    ("day", "said"),
    [
        (date(2026, 7, 20), "2026-07-20 (124 days old)"),
        (date(2026, 11, 20), "2026-11-20 (1 day old)"),
        (date(2026, 11, 21), "2026-11-21 (today)"),
        (date(2026, 11, 22), "2026-11-22 (today)"),
    ],
)
def test_a_date_is_said_with_its_age(day: date, said: str):
    assert aged(day, NOW) == said


def test_a_catalog_that_was_written_is_read_back_the_same():
    spot = SpotList(as_of=NOW, usd_per_hour={"g5.xlarge": {"us-east-1a": Decimal("0.4012")}})
    scores = {"us-east-1": {"A10G": Scores(as_of=NOW, by_zone={"use1-az4": 7})}}
    catalog = replace(load(), spot={"us-east-1": spot}, scores=scores)
    assert read(written(catalog)) == catalog
    assert written(read(written(catalog))) == written(catalog)


def test_a_file_of_old_is_read_with_what_the_package_knows_of_its_machines(tmp_path: Path):
    file = tmp_path / "catalog.json"
    file.write_text(
        """{"types": {"g5.xlarge": {"gpu": "A10G", "gpus": 1, "vram_gib": 24, "vcpus": 4, "memory_gib": 16, "efa": 0},
                      "g9.xlarge": {"gpu": "L9", "gpus": 1, "vram_gib": 64, "vcpus": 4, "memory_gib": 16, "efa": 0}},
            "prices": {"eu-west-1": {"as_of": "2026-10-01", "bounds": [], "usd_per_hour": {"g5.xlarge": "1.123"}}}}"""
    )
    catalog = load(file)
    assert catalog.machine("g5.xlarge") == MACHINES["g5.xlarge"]
    assert catalog.machine("g9.xlarge").network_gbps is None
    assert catalog.price("g5.xlarge", "eu-west-1") == ListPrice(usd_per_hour=Decimal("1.123"), as_of=date(2026, 10, 1))
    assert catalog.offered("eu-west-1") == load().offered("eu-west-1")


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


def test_the_network_is_read_as_ec2_names_it():
    def network(told: str, *cards: float) -> tuple[float | None, float | None]:
        kind = described("g9.xlarge", "L9", 1, 65536)
        listed = [{"BaselineBandwidthInGbps": gbps} for gbps in cards]
        kind["NetworkInfo"] = {"NetworkPerformance": told, "NetworkCards": listed}
        machine = machine_of(kind)
        assert machine is not None
        return machine.network_gbps, machine.burst_gbps

    assert network("400 Gigabit", 400, 400, 400, 400) == (400, None)
    assert network("4x 100 Gigabit", 100, 100, 100, 100) == (400, None)
    assert network("Up to 25 Gigabit", 5.0) == (5, 25)
    assert network("Up to 10 Gigabit") == (None, 10)
    assert network("Moderate", 0.3) == (None, None)


def test_a_part_of_a_gpu_counts_as_none():
    kind = described("g6f.xlarge", "L4", 0, 2861)
    kind["GpuInfo"]["Gpus"][0]["GpuPartitionSize"] = 0.125
    machine = machine_of(kind)
    assert machine is not None
    assert (machine.gpus, machine.gpu_part, machine.why_not) == (0, 0.125, "a part of a GPU")
    assert machine.vram_gib == 3  # 3.0·10^9 bytes, as the profile L4-3Q is sold


def test_only_machines_with_gpus_of_nvidia_are_taken():
    assert machine_of(described("g4ad.xlarge", "Radeon", 1, 8192, maker="AMD")) is None
    assert machine_of({"InstanceType": "m5.large"}) is None


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Aws:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    return Aws(region="us-east-1")


def answers(
    aws: Aws, kinds: list[dict[str, Any]], products: list[str], spot: list[dict[str, Any]] | None = None
) -> tuple[Stubber, Stubber]:
    """EC2 that offers each kind in two zones and in a local one, with these spot prices; the price list."""
    ec2, pricing = Stubber(aws.client("ec2", "eu-west-3")), Stubber(aws.client("pricing", "us-east-1"))
    ec2.add_response("describe_instance_types", {"InstanceTypes": kinds}, {"Filters": ANY})
    pricing.add_response("get_products", {"PriceList": products}, {"ServiceCode": "AmazonEC2", "Filters": ANY})
    offerings = [
        {"InstanceType": kind["InstanceType"], "Location": f"eu-west-3{zone}"}
        for kind in kinds
        if machine_of(kind) is not None
        for zone in ("a", "b", "-cdg-1a")
    ]
    ec2.add_response(
        "describe_instance_type_offerings",
        {"InstanceTypeOfferings": offerings},
        {"LocationType": "availability-zone", "Filters": ANY},
    )
    ec2.add_response("describe_spot_price_history", {"SpotPriceHistory": spot or []})
    return ec2, pricing


def quoted(name: str, zone: str, usd: str, minutes: int = 0) -> dict[str, Any]:
    return {
        "InstanceType": name,
        "AvailabilityZone": zone,
        "SpotPrice": usd,
        "Timestamp": NOW - timedelta(minutes=minutes),
    }


def test_a_refresh_writes_machines_and_prices_of_the_region(aws: Aws, tmp_path: Path):
    kinds = [
        described("g9.2xlarge", "L9", 1, 22888),
        described("g6f.xlarge", "L4", 0, 2861),
        described("g4ad.xlarge", "Radeon", 1, 8192, maker="AMD"),
        {"InstanceType": "m5.large"},
    ]
    products = [product("g9.2xlarge", "1.5000000000"), product("m5.large", "0.1"), product("g9.2xlarge", "0.0")]
    spot = [
        quoted("g9.2xlarge", "eu-west-3a", "0.61"),
        quoted("g9.2xlarge", "eu-west-3a", "0.60", minutes=90),
        quoted("g9.2xlarge", "eu-west-3b", "1.6"),
        quoted("g9.2xlarge", "eu-west-3c", ""),
        quoted("g9.2xlarge", "eu-west-3-cdg-1a", "0.1"),
    ]
    ec2, pricing = answers(aws, kinds, products, spot)
    file = tmp_path / "home" / "catalog.json"
    with ec2, pricing:
        catalog = refresh(aws, "eu-west-3", file, now=lambda: NOW)
    assert catalog.machine("g9.2xlarge") == Machine(
        name="g9.2xlarge", gpu="L9", gpus=1, vram_gib=24, vcpus=8, memory_gib=32, efa=1, nvme_gb=0
    )
    assert catalog.price("g9.2xlarge", "eu-west-3") == ListPrice(
        usd_per_hour=Decimal("1.5000000000"), as_of=date(2026, 11, 21), bound=False
    )
    assert catalog.priced_on(("eu-west-3",)) == date(2026, 11, 21)
    assert catalog.zones["eu-west-3"] == {"g9.2xlarge": 2, "g6f.xlarge": 2}
    assert catalog.spot == {
        "eu-west-3": SpotList(
            as_of=NOW,
            usd_per_hour={"g9.2xlarge": {"eu-west-3a": Decimal("0.61"), "eu-west-3b": Decimal("1.6")}},
        )
    }
    assert load(file) == catalog
    assert set(read(file.read_text(), load().machines).prices) == {"eu-west-3"}


def test_placement_scores_are_asked_for_by_model_where_the_region_has_it(aws: Aws, tmp_path: Path):
    kinds = [described("g5.xlarge", "A10G", 1, 22888), described("g6.xlarge", "L4", 1, 22888)]
    ec2, pricing = answers(aws, kinds, [product("g5.xlarge", "1.2")])
    ec2.add_response(
        "get_spot_placement_scores",
        {"SpotPlacementScores": [{"Region": "eu-west-3", "AvailabilityZoneId": "euw3-az1", "Score": 7}]},
        {
            "InstanceTypes": ["g5.xlarge"],
            "TargetCapacity": 1,
            "TargetCapacityUnitType": "units",
            "SingleAvailabilityZone": True,
            "RegionNames": ["eu-west-3"],
        },
    )
    with ec2, pricing:
        catalog = refresh(aws, "eu-west-3", tmp_path / "catalog.json", scored=("A10G", "H100"), now=lambda: NOW)
    assert catalog.scores == {"eu-west-3": {"A10G": Scores(as_of=NOW, by_zone={"euw3-az1": 7})}}


def test_no_more_scores_today_is_said(aws: Aws, tmp_path: Path):
    ec2, pricing = answers(aws, [described("g5.xlarge", "A10G", 1, 22888)], [product("g5.xlarge", "1.2")])
    ec2.add_client_error("get_spot_placement_scores", "MaxConfigLimitExceeded", "too many")
    with ec2, pricing, pytest.raises(ProvisionError, match="AWS scores no more new sets of machines") as caught:
        refresh(aws, "eu-west-3", tmp_path / "catalog.json", scored=("A10G",), now=lambda: NOW)
    assert caught.value.hint == "those that were asked for before are answered still; new ones again within a day"
    assert not (tmp_path / "catalog.json").exists()


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
    ec2, pricing = Stubber(aws.client("ec2", "eu-west-3")), Stubber(aws.client("pricing", "us-east-1"))
    ec2.add_response("describe_instance_types", {"InstanceTypes": []})
    pricing.add_response("get_products", {"PriceList": []})
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
