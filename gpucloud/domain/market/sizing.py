"""What a job's model needs of each GPU's memory, how much work the job is, how long it takes, and how often to save."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from gpucloud.domain.job.quantities import format_count
from gpucloud.domain.job.spec import Job, Model, Optimizer, Precision, Strategy
from gpucloud.domain.node.gate.models import sheet_of
from gpucloud.domain.offer import Offer

GB = 10**9
MOST_NODES = 64
LARGEST_WORLD = MOST_NODES * 16
"""GPUs of the largest job that a job file can name."""

_WEIGHTS = {Precision.BF16: 2 + 4, Precision.FP16: 2 + 4, Precision.FP8: 2 + 4 + 2, Precision.FP32: 4}
_COMPUTED = {Precision.BF16: 2, Precision.FP16: 2, Precision.FP8: 2, Precision.FP32: 4}
_OPTIMIZER = {Optimizer.ADAMW: 8, Optimizer.ADAM: 8, Optimizer.SGD: 4, Optimizer.ADAFACTOR: 0, Optimizer.ADAM8BIT: 2}
_WIDE = 128  # the width over the depth of Llama 7B and 13B, for models whose shape is not known
_CUDA_BYTES = _NCCL_BYTES = 10**9
_LOGIT_BYTES = 3 * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What one GPU holds while it trains, in bytes; `activations` is None where they cannot be counted."""

    states: int
    working: int
    activations: int | None
    margin: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.states + self.working + (self.activations or 0) + self.margin

    def __str__(self) -> str:
        parts = {"states": self.states, "working": self.working, "activations": self.activations, "margin": self.margin}
        terms = [f"{size / GB:.1f} GB {name}" for name, size in parts.items() if size]
        return f"{' + '.join(terms)} = {self.total / GB:.1f} GB"

    def fits(self, vram_gib: int) -> bool:
        """Whether a GPU that is sold with so much memory holds it."""
        return self.total <= vram_gib * GB


def memory(model: Model, ranks: int) -> Memory:
    """Return what each of so many GPUs holds."""
    whole = model.strategy is Strategy.DDP
    states = model.params * state_bytes(model) // (1 if whole else ranks)
    working, activations = _working(model, ranks), _activations(model)
    margin = (states + working + (activations or 0)) // 10 + _CUDA_BYTES + (_NCCL_BYTES if ranks > 1 else 0)
    return Memory(states=states, working=working, activations=activations, margin=margin)


def state_bytes(model: Model) -> int:
    """Return the bytes of weights, gradients and optimizer state for each parameter."""
    return _WEIGHTS[model.precision] + _COMPUTED[model.precision] + _OPTIMIZER[model.optimizer]


def saved_bytes(model: Model) -> int:
    """Return the size of a checkpoint: the weights in fp32 and the optimizer's state."""
    return model.params * (4 + _OPTIMIZER[model.optimizer])


def least_ranks(model: Model, vram_gib: int) -> int | None:
    """Return over how many such GPUs the model fits at the least; None: over none that a job file can name."""
    return next((ranks for ranks in range(1, LARGEST_WORLD + 1) if memory(model, ranks).fits(vram_gib)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A model and machines on which it fits; `words` is what of them the job file has to say anew."""

    model: Model
    nodes: int
    gpus: int
    words: str


def ways_to_fit(model: Model, *, nodes: int, gpus: int, vram_gib: int, counts: Sequence[int] = ()) -> Iterator[Way]:
    """Yield what may change for a model that does not fit on such GPUs, the least first; nobody says it is offered.

    It is the model, then GPUs in each machine, then machines, then both. `counts` are how many GPUs such machines have,
    for they are rented whole; without any it is as many as now.
    """
    for change in _changes(model):
        changed = replace(model, **change)
        needed = memory(changed, nodes * gpus)
        if needed.fits(vram_gib):
            told = f"model: {{{_written(change)}}} needs {needed.total / GB:.1f} GB a GPU" if change else ""
            yield Way(model=changed, nodes=nodes, gpus=gpus, words=told)
            break
    sharded = replace(model, **_sharded(model))
    least = least_ranks(sharded, vram_gib)
    if least is None:
        return
    whole = sorted({count for count in counts if count >= gpus}) or [gpus]
    wider = next((count for count in whole if count > gpus and nodes * count >= least), None)
    shapes = [(nodes, wider)] if wider is not None else []
    shapes += [(-(-least // count), count) for count in dict.fromkeys((whole[0], whole[-1]))]
    for more, count in shapes:
        said = [f"nodes: {more}"] * (more != nodes) + [f"gpus: {count}"] * (count != gpus)
        if nodes <= more <= MOST_NODES and said:
            words = f"{', '.join(said)}, with model: {{{_written(_sharded(model))}}}"
            yield Way(model=sharded, nodes=more, gpus=count, words=words)


def largest_that_fits(model: Model, *, nodes: int, gpus: int, vram_gib: int) -> Way | None:
    """Return the way with as many parameters, in two digits, as fit on such machines sharded; None: none fits."""
    sharded = replace(model, **_sharded(model))

    def fits(params: int) -> bool:
        return memory(replace(sharded, params=params), nodes * gpus).fits(vram_gib)

    low, high = 0, model.params
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    digit = 10 ** max(0, len(str(low)) - 2)
    params = low // digit * digit
    if params == 0 or not fits(params):
        return None
    words = f"model: {{params: {format_count(params)}, {_written(_sharded(model))}}}, the largest that fits there"
    return Way(model=replace(sharded, params=params), nodes=nodes, gpus=gpus, words=words)


def _sharded(model: Model) -> Mapping[str, Any]:
    """Return the keys by which the model takes the least of each GPU."""
    return {"strategy": Strategy.FSDP, **({"recompute": True} if model.seq is not None else {})}


def _changes(model: Model) -> Iterator[Mapping[str, Any]]:
    """Yield what of a model's keys may change, the least first; nothing before all."""
    yield {}
    ways: tuple[Mapping[str, Any], ...] = (
        {"strategy": Strategy.FSDP},
        {"recompute": True},
        {"strategy": Strategy.FSDP, "recompute": True},
    )
    for change in ways:
        if replace(model, **change) != model and (model.seq or "recompute" not in change):
            yield change


def training_flops(model: Model, tokens: int) -> float:
    """Return the operations of a training over so many tokens, without those that are made twice."""
    return 6.0 * model.params * tokens


def training_time(model: Model, tokens: int, *, gpus: int, tflops: float) -> timedelta:
    """Return how long that takes on so many GPUs with that peak, each, in the model's precision.

    OverflowError for more than a thousand million days.
    """
    per_second = gpus * tflops * 1e12 * model.mfu_percent / 100
    return timedelta(seconds=training_flops(model, tokens) / per_second)


def shape(model: Model) -> tuple[int, int]:
    """Return width and depth; what is not named follows from N = 12·l·h² (Kaplan et al., §2.1)."""
    if model.hidden is not None:
        return model.hidden, model.layers or max(1, round(model.params / (12 * model.hidden**2)))
    depth = model.layers or max(1, round((model.params / (12 * _WIDE**2)) ** (1 / 3)))
    return max(1, round((model.params / (12 * depth)) ** 0.5)), depth


def _written(keys: Mapping[str, object]) -> str:
    """The keys as a job file has them."""
    return ", ".join(f"{key}: {value.value if isinstance(value, Strategy) else 'true'}" for key, value in keys.items())


def _working(model: Model, ranks: int) -> int:
    computed = _COMPUTED[model.precision]
    if model.strategy is Strategy.DDP:
        buckets = 4 if ranks > 1 else 0
        return model.params * (buckets + (computed if _autocasts(model) else 0))
    width, depth = shape(model)
    outside = 2 * (model.vocab or 0) * width
    return (3 * model.params // depth + 2 * outside) * computed if ranks > 1 else 0


def _activations(model: Model) -> int | None:
    if model.seq is None:
        return None
    width, depth = shape(model)
    words = model.seq * model.batch
    scale = _COMPUTED[model.precision] // 2
    whole, between = (39, 4) if _autocasts(model) else (34 * scale, 2 * scale)
    a_layer = words * width * whole
    layers = words * width * depth * between + a_layer if model.recompute else a_layer * depth
    return layers + _LOGIT_BYTES * words * (model.vocab or 0)


def _autocasts(model: Model) -> bool:
    """Whether the weights stay in 32 bits and are cast where they are used; FSDP gathers them in 16."""
    return model.strategy is Strategy.DDP and _COMPUTED[model.precision] < 4


# How much work a job is: what its file says, or what its model's tokens take on the GPUs of an offer.


_LONGEST = timedelta(days=366)  # as the longest span that a job file can name


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The time that a job takes on its machines when nothing disturbs it; `source` says how that is known.

    `on_any_gpu`: it is what the file says, whatever the machines are.
    """

    span: timedelta
    source: str
    on_any_gpu: bool = False


def work_of(job: Job, offer: Offer) -> Work | None:
    """Return the work on the offer's machines; None where it is not known.

    What the file says in hours counts before what the model's tokens would take. A GPU that lacks the model's
    precision, or whose data sheet does not state it, has no time.
    """
    if job.work is not None:
        return Work(span=job.work, source="`work:` in the job file", on_any_gpu=True)
    model, tflops = job.model, _tflops(job, offer)
    if model is None or model.tokens is None or tflops is None:
        return None
    gpus = job.resources.nodes * job.resources.gpus
    try:
        span = min(_LONGEST, training_time(model, model.tokens, gpus=gpus, tflops=tflops))
    except OverflowError:
        span = _LONGEST
    operations = f"6 · {format_count(model.params)} · {format_count(model.tokens)} operations"
    peak = f"{gpus} × {tflops:g} TFLOPS ({offer.gpu}, {model.precision.value})"
    return Work(span=span, source=f"{operations} at {model.mfu_percent} % of {peak}")


def _tflops(job: Job, offer: Offer) -> float | None:
    sheet = sheet_of(offer.gpu) if offer.gpu is not None else None
    if sheet is None or job.model is None:
        return None
    return sheet.tflops.get(job.model.precision.value)


# How often to save: Young's and Daly's interval, before the first save of a job was measured.
#
#     τ* = √(2·δ·M)     δ what a save costs training, M the mean time between interruptions (Young 1974, Daly 2006)
#
# Where every interruption comes with a notice in which a save fits, the last one loses nothing, and three times τ*,
# half an hour at the most, costs less in all: replayed on the 204 recorded lives of April 2023, 2.2 % of the time
# against 5.7 % at δ = 15 s. Notices are best effort, so τ* is what `checkpoint: auto` keeps to.


_LONGEST_INTERVAL = timedelta(minutes=30)
_FROM_GPU_BYTES_S = 40e9  # four H200 of one host at once, each to pinned memory: docs/benchmarks.md
_UPLOAD_BYTES_S = 1e9  # of one machine to S3; a guess
_SLOWED = 0.03  # of an upload's time is what training loses beside it, as the library reckons too
_LEAST_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTimes:
    """What one save costs training, and how long its upload goes on beside it."""

    cost: timedelta
    upload: timedelta


def save_times(model: Model, *, nodes: int, gpus: int) -> SaveTimes:
    """Return what a save of the model takes: every rank copies and every node uploads its share."""
    size = saved_bytes(model)
    upload_s = size / nodes / _UPLOAD_BYTES_S
    cost_s = size / (nodes * gpus) / _FROM_GPU_BYTES_S + _SLOWED * upload_s
    return SaveTimes(cost=timedelta(seconds=cost_s), upload=timedelta(seconds=upload_s))


def interval(times: SaveTimes, between: timedelta) -> timedelta:
    """Return τ*, no shorter than an upload, for a mean time `between` interruptions."""
    young_s = (2 * times.cost.total_seconds() * between.total_seconds()) ** 0.5
    return timedelta(seconds=max(young_s, times.upload.total_seconds(), _LEAST_S))


def cheapest_interval(times: SaveTimes, between: timedelta, save_usd: float, usd_per_hour: float) -> timedelta:
    """Return τ* where a save costs money beside its time: as much as machines cost in that longer time."""
    paid = timedelta(hours=save_usd / usd_per_hour) if usd_per_hour else timedelta(0)
    return interval(SaveTimes(cost=times.cost + paid, upload=times.upload), between)


def interval_with_notice(times: SaveTimes, between: timedelta) -> timedelta:
    """Return the interval that is best when every interruption has a notice that suffices for a save."""
    return max(min(_LONGEST_INTERVAL, 3 * interval(times, between)), times.upload)
