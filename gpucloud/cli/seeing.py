"""See and reach a job: how it stands, what it writes and costs, its machines and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from gpucloud.cli.help import App, Json, Target, named

seeing = App(rich_markup_mode=None)
"""Part of the root: their commands stand beside its own."""


@seeing.command()
def status(
    target: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(
            metavar="[JOB|FILE]", help="A job's name, or a job file; every job if left out.", autocompletion=named
        ),
    ] = None,
    metrics: Annotated[bool, typer.Option("--metrics", help="How the job's machines were used, all attempts.")] = False,
    every: Annotated[bool, typer.Option("--all", help="List the rehearsals of --verify-resume too.")] = False,
    as_json: Json = False,
) -> None:
    """Say where a job stands and how it uses its GPUs; without a job, list all."""
    from gpucloud.cli.commands import asking

    raise typer.Exit(asking.status(target, history=metrics, every=every, as_json=as_json))


@seeing.command()
def watch(
    target: Target = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Show a job's GPUs, steps and money until it ends; Ctrl-C leaves the job alone."""
    from gpucloud.cli.commands import reaching

    raise typer.Exit(reaching.watch(target, as_json=as_json))


@seeing.command()
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


@seeing.command()
def metrics(
    target: Target = None,
    node: Annotated[Optional[str], typer.Option(help="Which node; the first if left out.")] = None,  # noqa: UP045
) -> None:
    """Write a machine's figures as Prometheus reads them."""
    from gpucloud.cli.commands import reaching

    raise typer.Exit(reaching.metrics(target, node))


@seeing.command()
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
    reconcile: Annotated[
        bool, typer.Option("--reconcile", help="One job beside AWS's own bill, which is asked once a day (0.01 USD).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say what jobs have cost, may still cost, and have left of their budgets."""
    from gpucloud.cli.commands import asking

    asked = asking.Asked(by=by, since=since, to=to, every=every)
    if reconcile:
        asking.require_one(targets or (), asked)
        raise typer.Exit(asking.reconcile(targets[0] if targets else None, as_json=as_json))
    raise typer.Exit(asking.cost(targets or (), asked, as_json=as_json))


@seeing.command()
def ssh(
    target: Target = None,
    command: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="COMMAND...", help="Run this: `hostname`, -- nvidia-smi -L, or 'cd /data; ls'."),
    ] = None,
    node: Annotated[Optional[str], typer.Option(help="Which node; the first if left out.")] = None,  # noqa: UP045
    forward: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("-L", metavar="PORT:HOST:PORT", help="As ssh: a port here leads there; 6006: the node's 6006."),
    ] = None,
) -> None:
    """Open a shell on a machine, or run a command."""
    from gpucloud.cli.commands import reaching

    raise typer.Exit(reaching.ssh(target, node, tuple(command or ()), tuple(forward or ())))


@seeing.command()
def cp(
    source: Annotated[str, typer.Argument(metavar="FROM", help="A path here, or JOB:path on a machine.")],
    target: Annotated[str, typer.Argument(metavar="TO", help="The other side: JOB:path, or a path here.")],
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="Folders too.")] = False,
    node: Annotated[Optional[str], typer.Option(help="Which node; that of rank 0 if left out.")] = None,  # noqa: UP045
    as_json: Json = False,
) -> None:
    """Copy files to or from a job's machines; JOB:path starts in the job's code folder, JOB:@store/ is its store."""
    from gpucloud.cli.commands import reaching

    raise typer.Exit(reaching.copy(source, target, node=node, recursive=recursive, as_json=as_json))


@seeing.command()
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
