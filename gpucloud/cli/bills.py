"""A job's money as text for people, and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpucloud.cli.render import pool_json, quarantine_json, table, usd
from gpucloud.domain import codec
from gpucloud.domain.ledger import Charge, Spend, total
from gpucloud.domain.quantities import format_usd
from gpucloud.usecases.report import JobReport


def cost_text(report: JobReport) -> str:
    """Return a job's money as a table."""
    return "\n".join([charges_text(report.charges), "", spend_text(report.spend)])


def charges_text(charges: Sequence[Charge]) -> str:
    """Return charges as a table, one a row."""
    rows = [("node", "attempt", "machine", "from", "seconds", "USD/h", "USD", "")]
    rows += [
        (
            charge.node_id,
            str(charge.attempt or "-"),
            str(charge.pool),
            f"{charge.start:%H:%M:%S}",
            f"{(charge.end - charge.start).total_seconds():.0f}",
            usd(charge.usd_per_hour),
            f"{charge.usd:.6f}",
            charge.note,
        )
        for charge in charges
    ]
    return table(rows)


def spend_text(spend: Spend) -> str:
    """Return the sums, one a line."""
    rows = [
        ("spent", format_usd(spend.spent_usd)),
        ("promised", format_usd(spend.promised_usd)),
        ("left", f"{format_usd(spend.left_usd)} of {format_usd(spend.budget_usd)}"),
    ]
    if spend.forecast_usd is not None:
        rows.append(("forecast", format_usd(spend.forecast_usd)))
    return table(rows)


def cost_json(report: JobReport) -> dict[str, Any]:
    """Return a job's money as an object: the sums, and every charge."""
    return {
        "job": report.job,
        "spend": spend_json(report.spend),
        "by_attempt": [{"attempt": key, "usd": usd(total(c))} for key, c in _grouped(report.charges, "attempt")],
        "by_node": [{"node": key, "usd": usd(total(c))} for key, c in _grouped(report.charges, "node_id")],
        "charges": [_charge_json(charge) for charge in report.charges],
        "quarantined": [quarantine_json(one) for one in report.quarantined],
    }


def spend_json(spend: Spend) -> dict[str, str | None]:
    """Return the money as decimal strings."""
    return {
        "spent_usd": usd(spend.spent_usd),
        "promised_usd": usd(spend.promised_usd),
        "left_usd": usd(spend.left_usd),
        "budget_usd": usd(spend.budget_usd),
        "forecast_usd": usd(spend.forecast_usd) if spend.forecast_usd is not None else None,
    }


def _charge_json(charge: Charge) -> dict[str, Any]:
    return {
        "node": charge.node_id,
        "attempt": charge.attempt,
        **pool_json(charge.pool),
        "start": codec.plain(charge.start),
        "end": codec.plain(charge.end),
        "usd_per_hour": usd(charge.usd_per_hour),
        "usd": usd(charge.usd),
        "note": charge.note,
    }


def _grouped(charges: Sequence[Charge], key: str) -> list[tuple[Any, list[Charge]]]:
    groups: dict[Any, list[Charge]] = {}
    for charge in charges:
        groups.setdefault(getattr(charge, key), []).append(charge)
    return list(groups.items())
