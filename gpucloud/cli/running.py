"""The commands by which a job begins, changes and ends."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from gpucloud.cli.help import App, Json, OnCloud, Target, named

running = App(rich_markup_mode=None)
"""Part of the root: their commands stand beside its own."""

Again = Annotated[bool, typer.Option("--again", help="Begin a new run of what has succeeded, unasked, or has failed.")]
Keep = Annotated[
    bool, typer.Option("--keep", help="Leave the machines up at the end, while they are paid, for a look at them.")
]
Detached = Annotated[bool, typer.Option("--detach", help="Return when the machines are there; they drive the job.")]
Unattended = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(metavar="TIME", help="Machines drive the job, prepaid for TIME (8h); this computer may be off."),
]
ProfileSteps = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(min=1, max=1000, metavar="STEPS", help="As --profile, and how many; 5 if left out."),
]
VerifyResume = Annotated[
    bool, typer.Option("--verify-resume", help="Prove on two short runs that the script resumes to the bit.")
]
VerifySteps = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(min=4, max=1000, metavar="STEPS", help="As --verify-resume, and of how many steps; 8 if left out."),
]
AnotherBudget = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--budget", metavar="SUM", help="Another budget than the job file's, such as '40 USD'."),
]


@running.command()
def plan(
    target: Target = None,
    cloud: OnCloud = None,
    plot: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", help="Draw cost against deadline into a .png or .svg file."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what would be rented, what it is going to cost and when it will be done; nothing is made."""
    from gpucloud.cli.commands import training

    raise typer.Exit(training.plan(target, on=cloud, plot=plot, as_json=as_json))


@running.command()
def up(target: Target = None, cloud: OnCloud = None, again: Again = False, as_json: Json = False) -> None:
    """Start the job's machines, prepaid and prepared, without training."""
    from gpucloud.cli.commands import training

    raise typer.Exit(training.up(target, on=cloud, again=again, as_json=as_json))


@running.command()
def train(  # noqa: PLR0913, PLR0917  each is an option
    target: Target = None,
    cloud: OnCloud = None,
    keep: Keep = False,
    detach: Detached = False,
    unattended: Unattended = None,
    drill: Annotated[bool, typer.Option("--drill", help="Have one machine interrupted once, in mid-run.")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Record a few steps of each rank.")] = False,
    profile_steps: ProfileSteps = None,
    verify_resume: VerifyResume = False,
    verify_steps: VerifySteps = None,
    budget: AnotherBudget = None,
    adopt: Annotated[bool, typer.Option("--adopt", help="Go on with a run that another job file began.")] = False,
    again: Again = False,
    as_json: Json = False,
) -> None:
    """Run a job to its end, or continue it: machines, code, training, interruptions, teardown, cost."""
    from gpucloud.cli.commands import training
    from gpucloud.cli.target import sum_of

    if verify_resume or verify_steps is not None:
        from gpucloud.cli.commands import verifying
        from gpucloud.usecases.checkpoint.comparing import STEPS

        others = {
            "--keep": keep,
            "--detach": detach,
            "--unattended": unattended,
            "--drill": drill,
            "--profile": profile,
        }
        verifying.require_alone([option for option, given in others.items() if given])
        total = sum_of(budget)
        asked_steps = verify_steps or STEPS
        raise typer.Exit(verifying.verify_resume(target, asked_steps, on=cloud, budget_usd=total, as_json=as_json))
    steps = profile_steps or (5 if profile else None)
    asked = training.Asked(
        keep=keep,
        detach=detach,
        drill=drill,
        profile_steps=steps,
        unattended=unattended,
        budget_usd=sum_of(budget),
        adopts=adopt,
        again=again,
    )
    raise typer.Exit(training.train(target, asked, on=cloud, as_json=as_json))


@running.command()
def budget(
    words: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(
            metavar="[JOB|FILE] [SUM]",
            help="A job's name, or a job file, gpucloud.yaml here if left out; and what it may cost in all, as 40 USD.",
            autocompletion=named,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Raise or lower a job's budget, also while it runs; without a sum, show it and its changes."""
    from gpucloud.cli.commands import passes
    from gpucloud.cli.target import meant

    job, wanted = meant(words or [])
    raise typer.Exit(passes.budget(job, wanted, as_json=as_json))


@running.command()
def down(
    target: Target = None,
    base: Annotated[bool, typer.Option("--base", help="Remove what stays on AWS between jobs.")] = False,
    region: Annotated[Optional[str], typer.Option(help="With --base: where.")] = None,  # noqa: UP045
    with_data: Annotated[bool, typer.Option("--with-data", help="With --base: the bucket too, and all in it.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --with-data: delete without asking.")] = False,
    as_json: Json = False,
) -> None:
    """Save and end a job, end its machines, and show that nothing is left."""
    if base:
        from gpucloud.cli.commands import setting_up

        raise typer.Exit(setting_up.end_base(region, with_data=with_data, yes=yes, as_json=as_json))
    from gpucloud.cli.commands import passes

    raise typer.Exit(passes.down(target, as_json=as_json))


@running.command()
def rm(
    target: Target = None,
    with_checkpoints: Annotated[bool, typer.Option("--with-checkpoints", help="Its checkpoints too.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
    as_json: Json = False,
) -> None:
    """Delete what is kept of a job that is over."""
    from gpucloud.cli.commands import passes

    raise typer.Exit(passes.rm(target, with_checkpoints=with_checkpoints, yes=yes, as_json=as_json))


@running.command()
def reconcile(
    target: Target = None,
    every: Annotated[bool, typer.Option("--all", help="Every job that may still have machines.")] = False,
    store: Annotated[Optional[str], typer.Option(help="With --all: every job in this store too.")] = None,  # noqa: UP045
    as_json: Json = False,
) -> None:
    """Make one pass for a job and leave: for cron and CI schedules."""
    from gpucloud.cli.commands import passes

    if every or store:
        raise typer.Exit(passes.reconcile_all(store, as_json=as_json))
    raise typer.Exit(passes.reconcile(target, as_json=as_json))
