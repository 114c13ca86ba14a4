"""`gpucloud doctor`: this machine, or those of a job."""

from __future__ import annotations

from typing import Any

from gpucloud.cli.health import checked_json, checked_text, is_fit
from gpucloud.cli.render import say, say_json, table, tell
from gpucloud.cli.target import known_job, read_target
from gpucloud.domain.errors import UsageError
from gpucloud.domain.gate.findings import REFUSED
from gpucloud.domain.shown import set_off
from gpucloud.usecases.doctor import Examined, examine
from gpucloud.wiring import Gpucloud


def doctor(target: str | None, *, full: bool, as_json: bool) -> int:
    """Say how machines are; return 0, or 14 when one is not fit."""
    return _job(target, full=full, as_json=as_json) if target is not None else _here(full=full, as_json=as_json)


def _here(*, full: bool, as_json: bool) -> int:
    looked = Gpucloud().look_here(full=full)
    checked = looked.checked
    if as_json:
        machine = {"checks": [{"name": c.name, "ok": c.ok, "text": c.text, "hint": c.hint} for c in looked.checks]}
        say_json({"machine": machine, **checked_json(checked), "fit": is_fit(checked)})
    else:
        words = {True: "ok", False: "wrong", None: "-"}
        rows = [(c.name, words[c.ok], c.text if c.ok or not c.hint else f"{c.text}: {c.hint}") for c in looked.checks]
        say("this machine\n" + table([("check", "", "found"), *rows]) + "\n\n" + checked_text(checked))
        if not full and checked.report.gpus:
            tell("compute, memory and NVLink were not tried: gpucloud doctor --full")
    return 0 if is_fit(checked) else REFUSED


def _job(target: str | None, *, full: bool, as_json: bool) -> int:
    cloud = Gpucloud()
    known = known_job(cloud, target)
    state = cloud.asker(known).state()
    cloud.require_key(known, state)
    world = cloud.world(read_target(cloud, known.name).job, known.name, goes_on=False)
    try:
        found = examine(world, state, full=full)
    finally:
        world.shell.close()
    if not found:
        raise UsageError(
            f"{known.name} has no machine that is up",
            hint=f"gpucloud {'status' if state.status.ended else 'up'} {known.name}",
        )
    fit = all(one.checked is not None and is_fit(one.checked) for one in found)
    if as_json:
        say_json({"job": known.name, "nodes": [_node_json(one) for one in found], "fit": fit})
    else:
        say("\n\n".join(_node_text(one) for one in found))
    return 0 if fit else REFUSED


def _node_json(one: Examined) -> dict[str, Any]:
    checked = checked_json(one.checked) if one.checked is not None else {"gpus": [], "findings": [], "figures": {}}
    return {"id": one.node.id, "error": one.error, "busy": one.busy, **checked}


def _node_text(one: Examined) -> str:
    head = f"{one.node.id} ({one.node.pool.instance_type}, {one.node.address})"
    if one.checked is None:
        return f"{head}\nnot examined: {set_off(one.error or '')}"
    busy = "\na job uses it now: it was not put to work" if one.busy else ""
    return f"{head}{busy}\n{checked_text(one.checked)}"
