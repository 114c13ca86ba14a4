"""The commands about one job: by which it begins, changes and ends, and by which it is looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from gpucloud.cli.help import App, Json, OnCloud, Target, named

jobs = App(rich_markup_mode=None)
"""Part of the root: their commands stand beside its own."""

Again = Annotated[bool, typer.Option("--again", help="A new run, unasked: after success, its error or its deadline.")]
Keep = Annotated[
    bool, typer.Option("--keep", help="Leave the machines up after a success, while they are paid, for a look at them.")
]
Detached = Annotated[
    bool, typer.Option("--detach", help="Return when the machines are there; they drive the job, prepaid for 8h.")
]
Unattended = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        metavar="TIME", help="Machines drive the job, prepaid for TIME, such as 8h; this computer may be off."
    ),
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


@jobs.command()
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


@jobs.command()
def up(target: Target = None, cloud: OnCloud = None, again: Again = False, as_json: Json = False) -> None:
    """Start the job's machines, prepaid and prepared, without training."""
    from gpucloud.cli.commands import training

    raise typer.Exit(training.up(target, on=cloud, again=again, as_json=as_json))


@jobs.command()
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
    from gpucloud.cli.faults import moved_on_the_line, sum_of

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
        with moved_on_the_line(shared_by=2, budget=total):
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
    with moved_on_the_line(budget=asked.budget_usd):
        raise typer.Exit(training.train(target, asked, on=cloud, as_json=as_json))


@jobs.command()
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
    from gpucloud.cli.faults import meant, require_job

    job, wanted = meant(words or [])
    require_job(job, wanted)
    raise typer.Exit(passes.budget(job, wanted, as_json=as_json))


@jobs.command()
def down(  # noqa: PLR0913, PLR0917  each is an option
    target: Target = None,
    adopt: Annotated[bool, typer.Option("--adopt", help="End a run that another job file began.")] = False,
    abandon: Annotated[bool, typer.Option("--abandon", help="Give up results that cannot come home.")] = False,
    base: Annotated[bool, typer.Option("--base", help="Remove what stays on AWS between jobs.")] = False,
    region: Annotated[Optional[str], typer.Option(metavar="REGION", help="With --base: where.")] = None,  # noqa: UP045
    with_data: Annotated[bool, typer.Option("--with-data", help="With --base: the bucket too, and all in it.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --with-data: delete without asking.")] = False,
    as_json: Json = False,
) -> None:
    """Save and end a job, end its machines, and show that nothing is left."""
    if base:
        from gpucloud.cli.commands import setting_up

        raise typer.Exit(setting_up.end_base(region, with_data=with_data, yes=yes, as_json=as_json))
    from gpucloud.cli.commands import passes

    raise typer.Exit(passes.down(target, adopts=adopt, abandons=abandon, as_json=as_json))


@jobs.command()
def rm(  # noqa: PLR0913, PLR0917  each is an option
    target: Target = None,
    with_checkpoints: Annotated[bool, typer.Option("--with-checkpoints", help="Its checkpoints too.")] = False,
    with_outputs: Annotated[
        bool, typer.Option("--with-outputs", help="Results in its store too; those on hosts of your own stay there.")
    ] = False,
    adopt: Annotated[bool, typer.Option("--adopt", help="Delete a run that another job file began.")] = False,
    forget: Annotated[bool, typer.Option("--forget", help="Its store is lost: what is kept here alone.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
    as_json: Json = False,
) -> None:
    """Delete what is kept of a job that is over."""
    from gpucloud.cli.commands import passes

    if forget:
        raise typer.Exit(passes.forget(target, yes=yes, as_json=as_json))
    raise typer.Exit(
        passes.rm(
            target,
            with_checkpoints=with_checkpoints,
            with_outputs=with_outputs,
            adopts=adopt,
            yes=yes,
            as_json=as_json,
        )
    )


@jobs.command()
def reconcile(
    target: Target = None,
    every: Annotated[bool, typer.Option("--all", help="Every job that may still have machines.")] = False,
    store: Annotated[str | None, typer.Option(metavar="STORE", help="With --all: every job in this store too.")] = None,
    as_json: Json = False,
) -> None:
    """Make one pass for a job and leave: for cron and CI schedules."""
    from gpucloud.cli.commands import passes

    if every or store:
        raise typer.Exit(passes.reconcile_all(store, as_json=as_json))
    raise typer.Exit(passes.reconcile(target, as_json=as_json))


# See and reach a job: how it stands, what it writes and costs, its machines and checkpoints.


@jobs.command()
def status(
    target: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(
            metavar="[JOB|FILE]", help="A job's name, or a job file; every job if left out.", autocompletion=named
        ),
    ] = None,
    history: Annotated[bool, typer.Option("--history", help="How the job's machines were used, all attempts.")] = False,
    rehearsals: Annotated[
        bool, typer.Option("--rehearsals", help="List the short runs of --verify-resume too.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say where a job stands and how it uses its GPUs; without a job, list all."""
    from gpucloud.cli.commands import asking

    raise typer.Exit(asking.status(target, history=history, rehearsals=rehearsals, as_json=as_json))


@jobs.command()
def watch(
    target: Target = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Show a job's GPUs, steps and money until it ends; Ctrl-C leaves the job alone."""
    from gpucloud.cli.commands import reaching

    raise typer.Exit(reaching.watch(target, as_json=as_json))


@jobs.command()
def logs(  # noqa: PLR0913, PLR0917  each is an option
    target: Target = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    attempt: Annotated[Optional[int], typer.Option(help="Only this attempt.")] = None,  # noqa: UP045
    rank: Annotated[Optional[int], typer.Option(help="Only this rank; 0 is what `train` shows.")] = None,  # noqa: UP045
    node: Annotated[Optional[str], typer.Option(metavar="ID", help="Only that node's ranks.")] = None,  # noqa: UP045
    tail: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--tail", "-n", min=0, metavar="N", help="Only each rank's last N lines before now."),
    ] = None,
    since: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="TIME", help="Only lines since then: 10m (ago), 18:40 (UTC), 2026-11-24T18:40:00Z."),
    ] = None,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", "-t", help="Before each line, when its node had it, UTC.")
    ] = False,
    launch: Annotated[bool, typer.Option("--launch", help="How each node was launched instead: JSON lines.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Write the output of a job's script."""
    from gpucloud.cli.commands import logs as output

    if launch:
        raise typer.Exit(output.launches(target, attempt=attempt))
    wanted = output.Wanted(
        follow=follow,
        attempt=attempt,
        rank=rank,
        node=node,
        tail=tail,
        since=since,
        timestamps=timestamps,
        as_json=as_json,
    )
    raise typer.Exit(output.logs(target, wanted))


@jobs.command()
def events(
    target: Target = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Say what happened to a job, in order: machines, starts, interruptions, budget, its end."""
    from gpucloud.cli.commands import events as command

    raise typer.Exit(command.events(target, follow=follow, as_json=as_json))


@jobs.command()
def metrics(
    target: Target = None,
    node: Annotated[Optional[str], typer.Option(metavar="ID", help="Which node; the first if left out.")] = None,  # noqa: UP045
) -> None:
    """Write a machine's figures as Prometheus reads them."""
    from gpucloud.cli.commands import reaching

    raise typer.Exit(reaching.metrics(target, node))


@jobs.command()
def cost(  # noqa: PLR0913, PLR0917  each is an option
    targets: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(
            metavar="[JOB|FILE]...",
            help="Jobs' names, or job files; gpucloud.yaml here if left out.",
            autocompletion=named,
        ),
    ] = None,
    by: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--by", metavar="WAY", help="Summed by job, attempt, node, day, kind or tag:KEY."),
    ] = None,
    since: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--since", metavar="DAY", help="Only what was spent from that day on, such as 2026-11-01, UTC."),
    ] = None,
    to: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--csv", metavar="FILE", help="Write CSV: every charge, or the sums with --by; - to write here."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every known job.")] = False,
    bill: Annotated[
        bool, typer.Option("--bill", help="One job beside AWS's own bill, which is asked once a day (0.01 USD).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say what jobs have cost, may still cost, and have left of their budgets."""
    from gpucloud.cli.commands import asking

    asked = asking.Asked(by=by, since=since, to=to, every=every)
    if bill:
        asking.require_one(targets or (), asked)
        raise typer.Exit(asking.bill(targets[0] if targets else None, as_json=as_json))
    raise typer.Exit(asking.cost(targets or (), asked, as_json=as_json))


@jobs.command()
def ssh(
    target: Target = None,
    command: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="COMMAND...", help="Run this: `hostname`, -- nvidia-smi -L, or 'cd /data; ls'."),
    ] = None,
    node: Annotated[Optional[str], typer.Option(metavar="ID", help="Which node; the first if left out.")] = None,  # noqa: UP045
    forward: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("-L", metavar="PORT:HOST:PORT", help="As ssh: a port here leads there; 6006: the node's 6006."),
    ] = None,
) -> None:
    """Open a shell on a machine, or run a command."""
    from gpucloud.cli.commands import reaching

    raise typer.Exit(reaching.ssh(target, node, tuple(command or ()), tuple(forward or ())))


@jobs.command()
def cp(
    source: Annotated[str, typer.Argument(metavar="FROM", help="A path here, or JOB:path on a machine.")],
    target: Annotated[str, typer.Argument(metavar="TO", help="The other side: JOB:path, or a path here.")],
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="Folders too.")] = False,
    node: Annotated[Optional[str], typer.Option(metavar="ID", help="Which node; that of rank 0 if left out.")] = None,  # noqa: UP045
    as_json: Json = False,
) -> None:
    """Copy files to or from a job's machines; JOB:path starts in the job's code folder, JOB:@store/ is its store."""
    from gpucloud.cli.commands import reaching

    raise typer.Exit(reaching.copy(source, target, node=node, recursive=recursive, as_json=as_json))


@jobs.command()
def checkpoints(  # noqa: PLR0913, PLR0917  each is an option
    target: Target = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every byte; says each object that is damaged.")
    ] = False,
    prune: Annotated[bool, typer.Option("--prune", help="Show what no restore needs; --yes deletes it.")] = False,
    pull: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="DIR", help="Bring one to a folder that GPUCLOUD_STORE=DIR resumes from."),
    ] = None,
    export: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", help="Write the model's weights as a safetensors file, or to a folder."),
    ] = None,
    step: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=0, help="Which one; what a restore takes first if left out."),
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The one that the script called best: run.save(best=…).")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--with-state", help="With --export: optimizer and other state too.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --prune: delete.")] = False,
    as_json: Json = False,
) -> None:
    """List a job's checkpoints; verify them, delete old ones, bring one here."""
    from gpucloud.cli.commands import checkpoints as command

    asked = command.Asked(
        verify=verify, prune=prune, pull=pull, export=export, step=step, best=best, everything=everything, yes=yes
    )
    raise typer.Exit(command.checkpoints(target, asked, as_json=as_json))
