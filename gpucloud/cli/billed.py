"""`cost --reconcile`: a job's ledger beside the cloud's own bill."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from gpucloud.cli.render import say, say_json, table, tell, usd
from gpucloud.cli.target import known_job
from gpucloud.domain.billed import LAG, Beside, Billed, beside
from gpucloud.domain.errors import UsageError
from gpucloud.usecases.reconciling import Reconciler
from gpucloud.wiring import Gpucloud

_USD_PER_REQUEST = Decimal("0.01")


def reconcile(target: str | None, *, as_json: bool) -> int:
    """Say our sum and the cloud's for each day and kind, and how far they are apart; return the exit code."""
    cloud = Gpucloud()
    known = known_job(cloud, target)
    billing = cloud.cloud_of(known).billing()
    if billing is None:
        raise UsageError(f"nobody sends a bill for {known.name}: it does not run on a rented cloud")
    asker = cloud.asker(known)
    report, now = asker.report(), cloud.clock.now()
    billed = Reconciler(jobs=asker.jobs, billing=billing).billed(report.charges, now)
    _tell_of(billed, fresh=billed.asked_at == now)
    rows = beside(report.charges, billed)
    if as_json:
        say_json(_json(known.name, billed, rows))
    else:
        say(_text(rows) if rows else "neither side knows of a cost")
    return 0


def _tell_of(billed: Billed, *, fresh: bool) -> None:
    paid = f"{_USD_PER_REQUEST * billed.requests} USD for {billed.requests} requests"
    when = f"{billed.asked_at:%Y-%m-%d %H:%M} UTC"
    tell(f"AWS's figures of {when}, {'which cost' if fresh else 'asked for at most once a day; they cost'} {paid}")
    tell(
        f"AWS's bill is about a day late: the last {LAG.days} days are not final. The bucket is all jobs' and not in it"
    )
    if not billed.lines:
        tell(
            "AWS knows of nothing with the tag gpucloud:job. Activate it in the billing console as a cost allocation"
            " tag: it counts from the next day on"
        )


def _text(rows: Sequence[Beside]) -> str:
    lines = [("day", "kind", "ours USD", "AWS USD", "drift USD", "")]
    lines += [
        (
            row.day,
            row.kind.value if row.kind else "other",
            *_sums(row.ours_usd, row.billed_usd),
            "" if row.final else "not final",
        )
        for row in rows
    ]
    final = [row for row in rows if row.final]
    if final:
        lines.append(("final", "", *_sums(_total(final, "ours_usd"), _total(final, "billed_usd")), _percent(final)))
    lines.append(("all", "", *_sums(_total(rows, "ours_usd"), _total(rows, "billed_usd")), ""))
    return table(lines)


def _sums(ours: Decimal, billed: Decimal) -> tuple[str, str, str]:
    return f"{ours:.4f}", f"{billed:.4f}", f"{billed - ours:+.4f}"


def _total(rows: Sequence[Beside], name: str) -> Decimal:
    return sum((getattr(row, name) for row in rows), Decimal(0))


def _percent(rows: Sequence[Beside]) -> str:
    ours = _total(rows, "ours_usd")
    return f"{(_total(rows, 'billed_usd') / ours - 1) * 100:+.1f} %" if ours else ""


def _json(job: str, billed: Billed, rows: Sequence[Beside]) -> dict[str, Any]:
    return {
        "job": job,
        "asked_at": billed.asked_at.isoformat(),
        "ours_usd": usd(_total(rows, "ours_usd")),
        "billed_usd": usd(_total(rows, "billed_usd")),
        "rows": [
            {
                "day": row.day,
                "kind": row.kind.value if row.kind else None,
                "ours_usd": usd(row.ours_usd),
                "billed_usd": usd(row.billed_usd),
                "drift_usd": usd(row.drift_usd),
                "final": row.final,
            }
            for row in rows
        ],
    }
