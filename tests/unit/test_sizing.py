"""What a model needs of a GPU and of time, against published figures and arithmetic done by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gpucloud.adapters.aws.prices.catalog import load
from gpucloud.adapters.aws.prices.market import ListedMarket
from gpucloud.adapters.hosts.records import POOL
from gpucloud.adapters.local.market import Devices, LocalMarket
from gpucloud.domain.errors import PlanRefused
from gpucloud.domain.job.quantities import parse_count
from gpucloud.domain.job.spec import (
    Cloud,
    Job,
    Model,
    Optimizer,
    OwnHost,
    Precision,
    Resources,
    SshChoices,
    Strategy,
)
from gpucloud.domain.market.plan import make_plan
from gpucloud.domain.market.sizing import (
    GB,
    Memory,
    largest_that_fits,
    least_ranks,
    memory,
    shape,
    state_bytes,
    training_flops,
    training_time,
    ways_to_fit,
)
from gpucloud.domain.money.budget import PrepaidRule
from gpucloud.domain.offer import Offer
from tests.fakes.market import NOW

FSDP = Strategy.FSDP


def billions(params: float, **more: object) -> Model:
    return Model(params=round(params * 10**9), **more)


@pytest.mark.parametrize(
    ("model", "ranks", "gb"),
    [
        (billions(1.5), 1, 24.0),  # ZeRO §3.1: GPT-2 "at least 24 GB"
        (billions(7.5), 64, 120.0),  # ZeRO figure 1, data parallel
        (billions(7.5, strategy=FSDP), 64, 1.875),  # figure 1, stage 3: "1.9 GB"
        (billions(7.5, strategy=FSDP), 4, 30.0),  # table 1
        (billions(128, strategy=FSDP), 64, 32.0),  # table 1
        (billions(128, strategy=FSDP), 1024, 2.0),  # table 1
        (billions(1000, strategy=FSDP), 1024, 15.625),  # table 1: "15.6"
        (billions(7, strategy=FSDP), 8, 14.0),  # Llama: 16 · 7 / 8
        (billions(13, strategy=FSDP), 8, 26.0),  # 16 · 13 / 8
        (billions(70, strategy=FSDP), 16, 70.0),  # 16 · 70 / 16
    ],
)
def test_model_states_are_those_of_the_zero_paper(model: Model, ranks: int, gb: float) -> None:
    assert memory(model, ranks).states == gb * GB


@pytest.mark.parametrize(
    ("precision", "optimizer", "size"),
    [
        (Precision.BF16, Optimizer.ADAMW, 16),  # 2 + 2 + 4 + 8
        (Precision.FP16, Optimizer.ADAM, 16),
        (Precision.FP32, Optimizer.ADAM, 16),  # 4 + 4 + 8
        (Precision.FP8, Optimizer.ADAMW, 18),  # and two 8-bit copies
        (Precision.BF16, Optimizer.SGD, 12),  # 2 + 2 + 4 + 4
        (Precision.FP32, Optimizer.SGD, 12),  # 4 + 4 + 4
        (Precision.BF16, Optimizer.ADAM8BIT, 10),  # 2 + 2 + 4 + 2
        (Precision.BF16, Optimizer.ADAFACTOR, 8),  # 2 + 2 + 4
    ],
)
def test_bytes_a_parameter(precision: Precision, optimizer: Optimizer, size: int) -> None:
    assert state_bytes(Model(params=1, precision=precision, optimizer=optimizer)) == size


@pytest.mark.parametrize(
    ("params", "width", "depth"),
    [
        (6.74, 4190, 32),  # Llama 7B has 4096, 32
        (13.0, 5204, 40),  # Llama 13B: 5120, 40
        (175, 12325, 96),  # GPT-3: 12288, 96
    ],
)
def test_a_shape_that_is_not_named_is_near_the_published_ones(params: float, width: int, depth: int) -> None:
    assert shape(billions(params)) == (width, depth)


def test_what_is_named_of_a_shape_counts() -> None:
    assert shape(billions(7, hidden=8192)) == (8192, 9)  # 7e9 / (12 · 8192²) = 8.7
    assert shape(billions(1.5, layers=48)) == (1614, 48)  # GPT-2 XL: 1600, 48
    assert shape(billions(7, hidden=5000, layers=3)) == (5000, 3)


@pytest.mark.parametrize(
    ("more", "size"),
    [
        # GPT-3 (Korthikanti et al., table 3): 34 · 2048 · 12288 · 96
        ({}, 82_141_249_536),
        # 2 · 2048 · 12288 · 96 + 34 · 2048 · 12288
        ({"recompute": True}, 5_687_476_224),
        ({"batch": 2}, 164_282_499_072),
        ({"precision": Precision.FP32}, 164_282_499_072),
        # and 12 · 2048 · 51200 of logits
        ({"vocab": 51_200}, 83_399_540_736),
    ],
)
def test_activations_are_those_of_korthikanti_et_al(more: dict[str, object], size: int) -> None:
    model = billions(175, strategy=FSDP, seq=2048, hidden=12_288, layers=96, **more)
    assert memory(model, 1024).activations == size


@pytest.mark.parametrize(
    ("more", "size"),
    [
        ({}, 94_220_845_056),  # 39 · 2048 · 12288 · 96
        ({"recompute": True}, 10_645_143_552),  # 4 · 2048 · 12288 · 96 + 39 · 2048 · 12288
        ({"precision": Precision.FP32}, 164_282_499_072),  # 68 · 2048 · 12288 · 96: nothing is cast
    ],
)
def test_autocast_keeps_sums_in_32_bits(more: dict[str, object], size: int) -> None:
    assert memory(billions(175, seq=2048, hidden=12_288, layers=96, **more), 1).activations == size


@pytest.mark.parametrize(
    ("width", "batch", "length", "strategy", "recompute", "needed_gb"),
    [  # four H200: `python -m tests.bench gpu_memory`
        (1024, 8, 1024, Strategy.DDP, False, 21.4),
        (1024, 8, 1024, Strategy.DDP, True, 16.3),
        (1024, 8, 1024, FSDP, False, 14.8),
        (1024, 8, 1024, FSDP, True, 8.6),
        (2048, 4, 2048, Strategy.DDP, False, 57.4),
        (2048, 4, 2048, Strategy.DDP, True, 43.3),
        (2048, 4, 2048, FSDP, False, 26.1),
        (2048, 4, 2048, FSDP, True, 14.8),
    ],
)
def test_what_gpts_were_measured_to_need_fits_and_not_by_far(
    width: int, batch: int, length: int, strategy: Strategy, recompute: bool, needed_gb: float
) -> None:
    model = billions(
        {1024: 0.4055, 2048: 1.4149}[width],
        strategy=strategy, recompute=recompute, hidden=width, layers=24, batch=batch, seq=length, vocab=50_304,
    )  # fmt: skip
    assert 0.8 < needed_gb * GB / memory(model, 4).total < 1


def test_a_gpu_alone_has_no_buckets_and_no_nccl() -> None:
    alone = Memory(states=24 * GB, working=3 * GB, activations=None, margin=3_700_000_000)
    assert memory(billions(1.5), 1) == alone
    assert memory(billions(1.5, precision=Precision.FP32), 1).working == 0


def test_ddp_has_a_copy_of_the_gradients_and_fsdp_three_layers_and_what_is_outside_of_them() -> None:
    whole = Memory(states=24 * GB, working=9 * GB, activations=None, margin=5_300_000_000)
    assert memory(billions(1.5), 8) == whole
    assert whole.total == 38_300_000_000
    # 7e9 / 28 = 0.25e9 parameters a layer, 3 × 2 bytes each
    sharded = memory(billions(7, strategy=FSDP, layers=28), 8)
    assert (sharded.working, sharded.margin) == (1_500_000_000, 3_550_000_000)
    # embedding and head, 2 · 32000 · 4096, and their gradients, 2 bytes each
    words = memory(billions(7, strategy=FSDP, layers=28, hidden=4096, vocab=32_000), 8)
    assert words.working == 1_500_000_000 + 1_048_576_000


@pytest.mark.parametrize(
    ("params", "vram_gib", "ranks"),
    [(7, 24, 6), (7, 40, 4), (7, 80, 2), (13, 80, 4), (34, 80, 9), (70, 80, 18), (70, 141, 10), (70, 24, 80)],
)
def test_over_how_many_gpus_a_sharded_model_fits(params: float, vram_gib: int, ranks: int) -> None:
    model = billions(params, strategy=FSDP)
    assert least_ranks(model, vram_gib) == ranks
    assert not memory(model, ranks - 1).fits(vram_gib)


def test_what_is_whole_on_each_gpu_does_not_fit_over_more_of_them() -> None:
    assert least_ranks(billions(7), 80) is None


@pytest.mark.parametrize(
    ("model", "tokens", "gpus", "days"),
    [
        # Narayanan et al. (arXiv:2104.04473, §5.1): GPT-3 over 300B tokens on 1024 A100 at 140 TFLOP/s: 34. Of these
        # 105 are the model's own, 34 % of 312; the others recompute.
        (billions(175, mfu_percent=34, recompute=True), 300, 1024, 33.6),
        # LLaMA (arXiv:2302.13971, §2.4): 65B over 1.4T tokens on 2048 A100, "approximately 21 days"
        (billions(65.2, mfu_percent=48), 1400, 2048, 20.7),
        # table 15: 7B over 1T tokens, 82,432 GPU-hours = 3.35 days on 1024
        (billions(6.74, mfu_percent=43), 1000, 1024, 3.4),
    ],
)
def test_a_trainings_time_is_the_published_one(model: Model, tokens: int, gpus: int, days: float) -> None:
    time = training_time(model, tokens * 10**9, gpus=gpus, tflops=312)
    assert time / timedelta(days=1) == pytest.approx(days, abs=0.05)


def test_what_is_computed_again_is_no_work_of_the_models_own() -> None:
    again, once = (billions(7, mfu_percent=40, recompute=recompute) for recompute in (True, False))
    assert training_flops(again, 10**9) == training_flops(once, 10**9)


def test_gpt_3_takes_as_many_operations_as_its_paper_says() -> None:
    assert training_flops(billions(174.6), 300 * 10**9) == pytest.approx(3.14e23, rel=0.002)


@pytest.mark.parametrize(
    ("model", "nodes", "gpus", "vram_gib", "way"),
    [
        # 16 · 7 / 8 + working and margin
        (billions(7), 1, 8, 80, "model: {strategy: fsdp} needs 18.8 GB a GPU"),
        (billions(7), 1, 1, 80, "nodes: 2, with model: {strategy: fsdp}"),
        (billions(70, strategy=FSDP), 1, 8, 80, "nodes: 3, with model: {strategy: fsdp}"),
        # 34 · 4096 · 8 · 4096 · 32 = 146 GB of activations
        (
            billions(7, strategy=FSDP, seq=4096, batch=8, hidden=4096, layers=32),
            1,
            8,
            80,
            "model: {recompute: true} needs 33.3 GB a GPU",
        ),
        (billions(7, seq=4096), 1, 8, 24, "model: {strategy: fsdp, recompute: true} needs 20.7 GB a GPU"),
        (billions(70, seq=4096), 1, 8, 80, "nodes: 3, with model: {strategy: fsdp, recompute: true}"),
    ],
)
def test_a_model_that_does_not_fit_is_told_the_number_that_must_move(
    model: Model, nodes: int, gpus: int, vram_gib: int, way: str
) -> None:
    assert not memory(model, nodes * gpus).fits(vram_gib)
    assert next(ways_to_fit(model, nodes=nodes, gpus=gpus, vram_gib=vram_gib)).words == way


def test_a_model_that_no_job_file_can_name_machines_for_is_told_the_largest_that_fits() -> None:
    model = billions(2000, strategy=FSDP)  # 31.25 GB of states on each of 1,024, and three of 216 layers
    assert list(ways_to_fit(model, nodes=1, gpus=16, vram_gib=16)) == []
    way = largest_that_fits(model, nodes=64, gpus=16, vram_gib=16)
    assert way is not None
    assert way.words == "model: {params: 150B, strategy: fsdp}, the largest that fits there"
    assert memory(way.model, 1024).fits(16)
    assert not memory(replace(way.model, params=way.model.params * 11 // 10), 1024).fits(16)


# A hint holds when it is followed: on AWS by the packaged catalog, on this machine with GPUs and without, on own hosts.


_FOUR = Devices(uuids=("GPU-0", "GPU-1", "GPU-2", "GPU-3"), model="H200", vram_gib=140)


class _Hosts:
    """Own hosts, which have what the job file says."""

    def offers(self, wanted: Resources) -> tuple[Offer, ...]:
        gpu = wanted.gpu[0] if wanted.gpu else None
        return (
            Offer(
                pool=POOL,
                usd_per_hour=Decimal(0),
                cap_usd_per_hour=Decimal(0),
                as_of=NOW,
                gpus=wanted.gpus,
                gpu=gpu,
                vram_gib=wanted.vram_gib,
            ),
        )


_MARKETS: dict[str, tuple[Cloud, Any]] = {
    "aws": (Cloud.AWS, ListedMarket(load(), ("us-east-1", "us-west-2"))),
    "four GPUs": (Cloud.LOCAL, LocalMarket(now=lambda: NOW, devices=lambda: _FOUR)),
    "no GPUs": (Cloud.LOCAL, LocalMarket(now=lambda: NOW, devices=Devices)),
    "three hosts": (Cloud.SSH, _Hosts()),
}


def _refusal(job: Job, market: Any) -> PlanRefused | None:
    def offered(tried: Job) -> tuple[Offer, ...]:
        return tuple(market.offers(tried.resources))

    try:
        make_plan(job, offered(job), NOW, PrepaidRule(), offered=offered)
    except PlanRefused as refused:
        return refused
    return None


def _followed(job: Job, hint: str) -> Job:
    """Return the job with what the hint says, as somebody would type it."""
    wanted: dict[str, Any] = {"gpu": (), "types": (), "regions": (), "vram_gib": None}
    resources = {key: wanted[key] for key in re.findall(r"(?:leave out|no) `(\w+)`", hint)}
    rest = re.sub(r"model: \{.*?\}|`.*?`", "", hint)
    resources |= {key: int(number) for key, number in re.findall(r"\b(nodes|gpus): (\d+)", rest)}
    resources |= {"gpu": (found[1],)} if (found := re.search(r"gpu: \[(.*?)\]", rest)) else {}
    keys = dict(word.split(": ") for word in ", ".join(re.findall(r"model: \{(.*?)\}", hint)).split(", ") if word)
    read: dict[str, Any] = {"strategy": Strategy, "recompute": "true".__eq__, "params": parse_count}
    model = replace(job.model, **{key: read[key](value) for key, value in keys.items()}) if job.model else None
    usd = re.search(r"budget: ([0-9.]+) USD", hint)
    assert resources or keys or usd, hint
    return replace(
        job,
        resources=replace(job.resources, **resources),
        model=model,
        budget_usd=Decimal(usd[1]) if usd else job.budget_usd,
    )


_ASKED = [
    Resources(),
    Resources(nodes=3),
    Resources(gpus=4),
    Resources(gpus=16),
    Resources(gpu=("T4",)),
    Resources(gpu=("H200",), gpus=8),
    Resources(gpu=("A100", "H100"), nodes=2),
    Resources(vram_gib=24),
    Resources(vram_gib=24, nodes=3),
    Resources(types=("g5.xlarge",)),
    Resources(types=("g5.xlarge",), gpu=("A10G",), regions=("us-west-2",)),
    Resources(nodes=8, gpu=("H200",), vram_gib=141),
]


@pytest.mark.parametrize("where", list(_MARKETS))
@pytest.mark.parametrize(
    "model", [None, *(billions(n, seq=seq) for n in (1, 7, 70, 700, 20_000) for seq in (None, 4096))], ids=str
)
def test_what_a_refusal_advises_is_accepted(where: str, model: Model | None, tmp_path: Path) -> None:
    cloud, market = _MARKETS[where]
    hosts = SshChoices(hosts=tuple(OwnHost(address=f"gpu{n}") for n in range(3)))
    for resources in _ASKED:
        if cloud is Cloud.SSH and resources.nodes > 3:
            continue
        for usd in (1, 100_000):
            job = Job(
                name="a",
                run="train.py",
                budget_usd=Decimal(usd),
                source=tmp_path,
                code=tmp_path,
                cloud=cloud,
                ssh=hosts,
                resources=resources,
                model=model,
            )
            first = _refusal(job, market)
            for _ in range(3):
                refused = _refusal(job, market)
                if refused is None:
                    break
                assert "gpucloud offers" not in (refused.hint or "") or cloud is Cloud.AWS, refused
                job = _followed(job, refused.hint or "")
            assert _refusal(job, market) is None, (where, resources, str(first), first and first.hint, job)


def test_a_model_and_its_memory_read_as_people_say_them() -> None:
    model = billions(7, strategy=FSDP, seq=4096, recompute=True)
    assert str(model) == "7.0B bf16 adamw fsdp recomputed"
    assert str(memory(model, 8)) == "14.0 GB states + 1.3 GB working + 1.7 GB activations + 3.7 GB margin = 20.7 GB"
    assert str(memory(billions(1.5), 1)) == "24.0 GB states + 3.0 GB working + 3.7 GB margin = 30.7 GB"


@pytest.mark.parametrize("cloud", [Cloud.AWS, Cloud.LOCAL])
@pytest.mark.parametrize("most_nodes", [0, 1])
def test_a_refusal_tries_a_few_ways_and_not_all_that_there_are(cloud: Cloud, most_nodes: int, tmp_path: Path) -> None:
    wanted = Resources(nodes=64, gpus=16, gpu=("A100",), types=("g5.xlarge",), vram_gib=900, regions=("us-east-1",))
    tried: list[Resources] = []

    def offered(job: Job) -> tuple[Offer, ...]:
        tried.append(job.resources)
        return _Hosts().offers(Resources()) if job.resources.nodes <= most_nodes else ()

    job = Job(
        name="a",
        run="train.py",
        budget_usd=Decimal(1),
        source=tmp_path,
        code=tmp_path,
        cloud=cloud,
        resources=wanted,
    )
    with pytest.raises(PlanRefused):
        make_plan(job, (), NOW, PrepaidRule(), offered=offered)
    assert len(tried) <= 200
