"""How often to save, by Young's and Daly's formula."""

from __future__ import annotations

from datetime import timedelta

import pytest

from gpucloud.domain.job.spec import Model, Optimizer
from gpucloud.domain.market.sizing import SaveTimes, interval, interval_with_notice, save_times

S = timedelta(seconds=1)
UP = timedelta(hours=2.1)  # the mean up-time of April 2023's recording


@pytest.mark.parametrize(
    ("cost_s", "upload_s", "every_s", "with_notice_s"),
    [
        # the reference's table: 2.9, 8.0 and 16 min
        (2, 0, 173.9, 521.7),
        (15, 0, 476.2, 1428.7),
        (60, 0, 952.5, 1800.0),
        # never more often than an upload takes
        (2, 600, 600.0, 1800.0),
        (2, 3000, 3000.0, 3000.0),
    ],
)
def test_the_interval_is_that_of_the_reference(
    cost_s: float, upload_s: float, every_s: float, with_notice_s: float
) -> None:
    times = SaveTimes(cost=cost_s * S, upload=upload_s * S)
    assert interval(times, UP).total_seconds() == pytest.approx(every_s, abs=0.1)
    assert interval_with_notice(times, UP).total_seconds() == pytest.approx(with_notice_s, abs=0.1)


def test_a_save_is_shared_by_ranks_and_nodes() -> None:
    # 7e9 · (4 + 8) = 84 GB: over 2 nodes at 1 GB/s, over 16 GPUs at 40 GB/s, and 3 % of the upload
    times = save_times(Model(params=7 * 10**9), nodes=2, gpus=8)
    assert times.upload == 42 * S
    assert times.cost.total_seconds() == pytest.approx(84 / 16 / 40 + 0.03 * 42)
    small = save_times(Model(params=7 * 10**9, optimizer=Optimizer.ADAFACTOR), nodes=2, gpus=8)
    assert small.upload == 14 * S
