"""`down` and `rm`: ends a job and shows that nothing of it is left; deletes what is kept of one that is over."""

from __future__ import annotations

from contextlib import suppress

from gpucloud.cli.commands.supervising import bring_stored_home, onlooker, say_what_is_left
from gpucloud.cli.interrupts import Leave, obeyed
from gpucloud.cli.render.reports import report_json, report_text
from gpucloud.cli.render.use import condition_word
from gpucloud.cli.render.words import is_meant, say, say_json, say_words, tell
from gpucloud.cli.target import called, known_job, other_runs, report_of, require_one_run
from gpucloud.domain.errors import GpucloudError, UsageError
from gpucloud.usecases.job.ending import Stored
from gpucloud.usecases.job.jobs import kept_of
from gpucloud.usecases.jobstore.condition import Condition
from gpucloud.usecases.jobstore.report import JobReport
from gpucloud.wiring import Gpucloud, KnownJob
from gpucloud.wiring.jobs import asker_of, deleter_of, ender_of, leftovers


def down(target: str | None, *, as_json: bool) -> int:
    """Save and end the job, end its machines, and show that nothing is left; return the exit code."""
    cloud = Gpucloud()
    cloud.home.give_reserve()
    known = known_job(cloud, target)
    ender = ender_of(cloud, known)
    try:
        with onlooker() as shown, obeyed(shown, asks=False) as interrupts:
            ender.end(shown, interrupts.wanted_end)
            bring_stored_home(cloud, cloud.ordered(known).newest(), known)
    except Leave as leave:
        say_what_is_left(ender.asker.state_as_listed(), ender.asker.clock.now())
        return leave.exit_code
    ender.require_empty()
    report = report_of(cloud, known)
    if as_json:
        say_json({**report_json(report), "left_over": []})
    else:
        say_words(report_text(report))
        tell("listed again: no machines, no node group")
    if target is None or target != known.name:
        _say_what_is_kept(cloud, known)
    return 0


def _say_what_is_kept(cloud: Gpucloud, ended: KnownJob) -> None:
    """Tell which other runs of the job file have machines: who names the file may mean them too."""
    for other in cloud.home.known():
        if other.file != ended.file or other.name == ended.name:
            continue
        with suppress(GpucloudError):  # of a run that cannot be looked at, `status` says why
            asker = asker_of(cloud, other)
            state = asker.state()
            kept = kept_of(asker.order(), state, asker.listed(state), asker.clock.now())
            if kept is not None:
                tell(str(kept))


def end_unsaved(cloud: Gpucloud, known: KnownJob) -> None:
    """End a run that nobody supervises and that is worth nothing, its machines at once. Raises Leave."""
    with onlooker() as shown, obeyed(shown, asks=False) as interrupts:
        ender_of(cloud, known).end_unsaved(shown, interrupts.wanted_end)


# `rm`: deletes what the store and this machine keep of a job that is over; a job with anything alive is refused.


def rm(target: str | None, *, with_checkpoints: bool, yes: bool, as_json: bool) -> int:
    """Delete a job that has ended: its state, output, bills, and its checkpoints if told so; return the exit code.

    UsageError while anything of it is alive, and for checkpoints or results that nobody said may go.
    """
    cloud = Gpucloud()
    known = known_job(cloud, target)
    require_one_run(cloud, target, "gpucloud rm JOB")
    name = called(cloud, known)
    deleter = deleter_of(cloud, known, lambda: _require_over(cloud, known, name))
    deleter.require_over()
    stored = deleter.stored()
    _require_allowed(name, stored, with_checkpoints=with_checkpoints)
    tell(f"{name}: {stored} in {known.store}; `gpucloud cost` will no longer know it")
    if not yes and not is_meant(f"gpucloud rm {name}{' --with-checkpoints' if with_checkpoints else ''} --yes"):
        return 2
    if others := other_runs(cloud, known):
        tell(f"of {len(others) + 1} runs, only {name} is deleted; the others stay: {', '.join(others)}")
    deleter.delete(stored, name)
    cloud.home.forget(known)
    if deleter.jobs.exists():  # a new run of the name is there by now, and is known by the same entry
        cloud.home.remember(known)
    if as_json:
        say_json({"job": known.name, "store": known.store, "objects": len(stored.keys), "bytes": stored.size})
    else:
        say(f"{name} is deleted: {stored}")
    return 0


def _require_allowed(name: str, stored: Stored, *, with_checkpoints: bool) -> None:
    if stored.checkpoints and not with_checkpoints:
        raise UsageError(
            f"{name} has {stored.saved}",
            hint=f"gpucloud rm {name} --with-checkpoints deletes them too;"
            f" gpucloud checkpoints {name} --pull DIR brings one here first",
        )


def _require_over(cloud: Gpucloud, known: KnownJob, name: str) -> None:
    state = asker_of(cloud, known).state()
    if not state.status.ended or not state.torn_down:
        raise _not_over(report_of(cloud, known), name)
    if left := leftovers(cloud, known):
        raise UsageError(f"of {name} is still listed: {', '.join(left)}", hint=f"gpucloud down {name}")
    if cloud.has_stored_outputs(known):
        raise UsageError(f"results of {name} are in the store", hint=f"gpucloud down {name} brings them home")


def _not_over(report: JobReport, name: str) -> UsageError:
    """Return why nothing of the job is deleted yet, and what is to be done first."""
    down = f"gpucloud down {name}"
    match report.condition:
        case Condition.HELD:
            why = f"{report.job} has failed, and its machines wait for a mended {report.awaits}"
            hint = f"{down} ends them; gpucloud train {name} goes on with them"
        case Condition.KEPT:
            why, hint = f"{report.job} has succeeded, and its machines are kept for a look", f"{down} ends them"
        case Condition.ENDING if report.supervisor is not None:
            why = f"{report.job} has {report.status.value}, and {report.supervisor} still ends its machines"
            hint = f"{down} waits for that"
        case Condition.ENDING | Condition.ENDED:
            why = f"{report.job} has {report.status.value}, and is not wound up: machines or results may be left"
            hint = f"{down} brings home what is there, and removes the rest"
        case Condition.TRAINED:
            why = f"{report.job} is not over: {condition_word(report)}"
            hint = f"{down} {'brings home what is there, and ' if report.outputs else ''}ends its machines"
        case _:
            why = f"{report.job} is not over: {condition_word(report)}"
            hint = f"{down} ends it and brings home what is there; gpucloud train {name} goes on with it"
    return UsageError(why, hint=hint)
