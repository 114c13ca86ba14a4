"""`gpucloud catalog refresh`: region by region, with scores of models that the catalog knows."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timezone
from decimal import Decimal
from types import SimpleNamespace

import pytest

from gpucloud.adapters.aws.prices.catalog import load
from gpucloud.adapters.aws.session import require_region
from gpucloud.cli.commands import setting_up
from gpucloud.domain.errors import UsageError
from gpucloud.domain.market.catalog import Catalog, Scores, SpotList

NOW = datetime(2026, 11, 21, 12, tzinfo=timezone.utc)


class Cloud:
    """An AWS of two regions that answers with one spot price and one score."""

    def __init__(self) -> None:
        self.aws = SimpleNamespace(region="us-east-1")
        self.catalog = load()
        self.regions = ("us-east-1", "us-west-2")
        self.asked: list[tuple[str, tuple[str, ...]]] = []

    def account(self) -> Cloud:
        return self

    def require_regions(self) -> None:
        for region in self.regions:
            require_region(region, self.catalog.regions)

    def caller(self) -> str:
        return "account 123456789012"

    def refresh_catalog(self, region: str, scored: tuple[str, ...]) -> Catalog:
        self.asked.append((region, scored))
        spot = SpotList(as_of=NOW, usd_per_hour={"p5.48xlarge": {f"{region}a": Decimal(20)}})
        scores = {gpu: Scores(as_of=NOW, by_zone={"az1": 3, "az2": 7}) for gpu in scored}
        return replace(self.catalog, spot={region: spot}, scores={region: scores})


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Cloud:
    made = Cloud()
    monkeypatch.setattr(setting_up, "Gpucloud", lambda: SimpleNamespace(aws=lambda *_: made))
    return made


def test_every_region_is_asked_and_told(cloud: Cloud, capsys: pytest.CaptureFixture[str]):
    assert setting_up.catalog_refresh((), ("h100",), as_json=False) == 0
    assert cloud.asked == [("us-east-1", ("H100",)), ("us-west-2", ("H100",))]
    assert capsys.readouterr().out.splitlines() == [
        "region     GPU machines  list prices  spot prices  scores",
        "us-east-1  64            68           1            2",
        "us-west-2  65            68           1            2",
    ]


def test_json_says_the_same(cloud: Cloud, capsys: pytest.CaptureFixture[str]):
    assert setting_up.catalog_refresh((), (), as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == {
        "version": 1,
        "regions": [
            {"region": "us-east-1", "machines": 64, "prices": 68, "spot": 1, "scores": 0},
            {"region": "us-west-2", "machines": 65, "prices": 68, "spot": 1, "scores": 0},
        ],
    }


def test_a_model_that_is_not_known_asks_nobody(cloud: Cloud):
    with pytest.raises(UsageError, match="the catalog has no GPU 'H10'"):
        setting_up.catalog_refresh((), ("H10",), as_json=False)
    assert cloud.asked == []
