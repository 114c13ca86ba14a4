"""Looking around: names are understood or the nearest is said, and spot prices are asked for what can match."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from decimal import Decimal

import pytest

from gpucloud.adapters.aws.prices.catalog import load
from gpucloud.cli.commands.offers import offers_json, offers_text
from gpucloud.domain.errors import UsageError
from gpucloud.domain.job.spec import MarketPolicy
from gpucloud.domain.market.catalog import SpotList
from gpucloud.domain.market.listing import Order, Query
from gpucloud.usecases.machines import look, understood

NOW = datetime(2026, 11, 21, 12, tzinfo=timezone.utc)
CATALOG = load()


class Quotes:
    """The same spot prices in every region; remembers what it was asked."""

    def __init__(self, usd_per_hour: Mapping[str, Mapping[str, Decimal]]) -> None:
        self._usd_per_hour = usd_per_hour
        self.asked: list[tuple[tuple[str, ...], tuple[str, ...]]] = []

    def spot_lists(self, regions: tuple[str, ...], names: tuple[str, ...]) -> Mapping[str, SpotList]:
        self.asked.append((regions, names))
        return {region: SpotList(as_of=NOW, usd_per_hour=self._usd_per_hour) for region in regions}


def test_names_are_understood_whatever_their_case():
    query = understood(Query(gpu=("h100", "rtx pro 6000"), types=("P5.48xlarge",), regions=("US-East-1",)), CATALOG)
    assert (query.gpu, query.types, query.regions) == (("H100", "RTX PRO 6000"), ("p5.48xlarge",), ("us-east-1",))


def test_without_regions_those_with_list_prices_are_meant():
    assert understood(Query(), CATALOG).regions == ("us-east-1", "us-east-2", "us-west-2")


@pytest.mark.parametrize(
    ("query", "message", "hint"),
    [
        (Query(gpu=("H10",)), "the catalog has no GPU 'H10'", "did you mean H100?"),
        (Query(gpu=("RTX 6000",)), "the catalog has no GPU 'RTX 6000'", "did you mean RTX PRO 6000?"),
        (Query(types=("p5.48xlage",)), "the catalog has no GPU machine 'p5.48xlage'", "did you mean p5.48xlarge?"),
        (Query(regions=("us-west2",)), "the catalog has no region 'us-west2'", "did you mean us-west-2?"),
    ],
)
def test_a_name_that_is_not_known_gets_the_nearest(query: Query, message: str, hint: str):
    with pytest.raises(UsageError) as caught:
        understood(query, CATALOG)
    assert (caught.value.message, caught.value.hint) == (message, hint)


def test_spot_prices_are_asked_of_machines_that_suit_and_take_the_place_of_estimates():
    quotes = Quotes({"p5.48xlarge": {"us-east-1a": Decimal("20.5"), "us-east-1b": Decimal("31")}})
    query = understood(Query(gpu=("H100",), regions=("us-east-1",), market=MarketPolicy.SPOT), CATALOG)
    found = look(query, Order.PRICE, CATALOG, quotes)
    assert quotes.asked == [(("us-east-1",), ("p5.48xlarge", "p5.4xlarge"))]
    (only,) = found.listings
    assert only.spot is not None
    assert (only.spot.low_usd_per_hour, only.spot.high_usd_per_hour, only.spot.estimated) == (
        Decimal("20.5"), Decimal(31), False,
    )  # fmt: skip


@pytest.mark.parametrize("query", [Query(market=MarketPolicy.ON_DEMAND), Query(gpu=("T4",), vram_gib=80)])
def test_nobody_is_asked_for_prices_that_do_not_matter(query: Query):
    quotes = Quotes({})
    look(understood(query, CATALOG), Order.PRICE, CATALOG, quotes)
    assert quotes.asked == []


H100 = understood(Query(gpu=("H100",), regions=("us-east-1",)), CATALOG)


def test_the_table_has_what_is_known():
    shown = look(H100, Order.PRICE, CATALOG).listings
    assert offers_text(shown, MarketPolicy.AUTO, width=0).splitlines() == [
        "machine      GPUs      GB  link    Gbps  EFA  region     zones    spot  on demand  saves  risk  per GPU"
        "  per PFLOP",
        "p5.4xlarge   1 × H100  80           100    1  us-east-1      6       ?      6.880                 6.880"
        "      6.953",
        "p5.48xlarge  8 × H100  80  NVLink  3200   32  us-east-1      6  ~26.42      55.04    52%  >20%    3.302"
        "      3.337",
    ]


def test_a_narrow_terminal_shows_the_columns_that_matter_most():
    shown = look(H100, Order.PRICE, CATALOG).listings
    assert offers_text(shown, MarketPolicy.AUTO, width=80).splitlines() == [
        "machine      GPUs      GB  region       spot  on demand  saves  risk  per GPU",
        "p5.4xlarge   1 × H100  80  us-east-1       ?      6.880                 6.880",
        "p5.48xlarge  8 × H100  80  us-east-1  ~26.42      55.04    52%  >20%    3.302",
    ]


def test_the_range_over_zones_and_what_is_not_offered_are_shown():
    quotes = Quotes({"p5.48xlarge": {"us-east-1a": Decimal("20.5"), "us-east-1b": Decimal("31")}})
    shown = look(H100, Order.PRICE, CATALOG, quotes).listings
    assert offers_text(shown, MarketPolicy.AUTO, width=90).splitlines() == [
        "machine      GPUs      GB  region            spot  on demand  saves  risk  per GPU",
        "p5.4xlarge   1 × H100  80  us-east-1         none      6.880                 6.880",
        "p5.48xlarge  8 × H100  80  us-east-1  20.50–31.00      55.04    62%  >20%    2.562",
    ]


def test_spot_machines_above_the_list_price_save_nothing_and_are_said_to_be_dearer():
    quotes = Quotes({"p5.48xlarge": {"us-east-1a": Decimal("66.048")}})
    query = understood(Query(gpu=("H100",), regions=("us-east-1",), types=("p5.48xlarge",)), CATALOG)
    lines = offers_text(look(query, Order.PRICE, CATALOG, quotes).listings, MarketPolicy.AUTO, width=0).splitlines()
    assert "20% dearer" in lines[1]


def test_json_has_the_query_as_it_was_understood_and_everything_known():
    answer = offers_json(look(H100, Order.PRICE, CATALOG))
    assert answer["query"] == {
        "gpu": ["H100"], "gpus": None, "vram_gib": None, "network_gbps": None, "efa": False, "nvlink": False,
        "types": [], "regions": ["us-east-1"], "market": "auto", "max_usd_per_hour": None,
    }  # fmt: skip
    assert answer["offers"][1] == {
        "instance_type": "p5.48xlarge", "gpu": "H100", "gpus": 8, "gpu_part": 1.0, "vram_gib": 80, "nvlink": True,
        "tflops": {"fp32": 67, "tf32": 494.5, "bf16": 989.5, "fp16": 989.5, "fp8": 1979}, "cuda": "11.8", "driver": 525,
        "vcpus": 192, "memory_gib": 2048, "network_gbps": 3200, "burst_gbps": None, "efa": 32, "nvme_gb": 30400,
        "architecture": "x86_64", "not_run": None, "region": "us-east-1", "zones": 6,
        "on_demand": {"usd_per_hour": "55.04", "as_of": "2026-07-20", "bound": False},
        "spot": {
            "low_usd_per_hour": "26.4192", "high_usd_per_hour": "26.4192", "zones": 0, "as_of": "2025-06-28",
            "estimated": True,
        },
        "spot_asked": False, "saving_percent": 52, "interruptions": ">20%", "placement_score": None,
        "usd_per_gpu_hour": "3.3024", "usd_per_pflop_hour": "3.337443",
    }  # fmt: skip
