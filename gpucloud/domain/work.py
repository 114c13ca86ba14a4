"""How much work a job is: what its file says, or what its model's tokens take on the GPUs of an offer."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from gpucloud.domain.hardware.datasheets import sheet_of
from gpucloud.domain.job import Job
from gpucloud.domain.offer import Offer
from gpucloud.domain.quantities import format_count
from gpucloud.domain.sizing import training_time

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
