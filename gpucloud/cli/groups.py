"""Commands that come in groups: the embedded cloud's, and those about an account rather than a job."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from gpucloud.cli.arguments import Drilled, Json, OneNode, Target

local = typer.Typer(
    help="The embedded cloud: have it take, freeze and cut off machines.", rich_markup_mode=None, no_args_is_help=True
)
quota = typer.Typer(help="What the AWS account may rent.", rich_markup_mode=None, no_args_is_help=True)
iam = typer.Typer(help="The rights that gpucloud needs on AWS.", rich_markup_mode=None, no_args_is_help=True)
catalog = typer.Typer(help="Machines and list prices.", rich_markup_mode=None, no_args_is_help=True)
tools = typer.Typer(help="Programs that gpucloud calls.", rich_markup_mode=None, no_args_is_help=True)


@local.command()
def interrupt(
    which: Drilled = None,
    node: OneNode = None,
    now: Annotated[bool, typer.Option("--now", help="Take it without notice, as `kill` does.")] = False,
    freeze_: Annotated[bool, typer.Option("--freeze", help="Stop it silently instead, as `freeze` does.")] = False,
    rebalance: Annotated[bool, typer.Option("--rebalance", help="Only recommend to leave it.")] = False,
    as_json: Json = False,
) -> None:
    """Take a node of the embedded fleet, with a notice unless told otherwise."""
    from gpucloud.cli.drills import Drill, drill

    what = Drill.REBALANCE if rebalance else Drill.FREEZE if freeze_ else Drill.KILL if now else Drill.INTERRUPT
    raise typer.Exit(drill(which, node, what, as_json=as_json))


@local.command()
def kill(which: Drilled = None, node: OneNode = None, as_json: Json = False) -> None:
    """Take a node of the embedded fleet without a notice: all of it is gone at once."""
    from gpucloud.cli.drills import Drill, drill

    raise typer.Exit(drill(which, node, Drill.KILL, as_json=as_json))


@local.command()
def freeze(which: Drilled = None, node: OneNode = None, as_json: Json = False) -> None:
    """Stop everything on a node of the embedded fleet: it is there, is paid for, and answers nothing."""
    from gpucloud.cli.drills import Drill, drill

    raise typer.Exit(drill(which, node, Drill.FREEZE, as_json=as_json))


@local.command()
def cut(which: Drilled = None, node: OneNode = None, as_json: Json = False) -> None:
    """Cut a node of the embedded fleet off the network; what runs on it goes on."""
    from gpucloud.cli.drills import Drill, drill

    raise typer.Exit(drill(which, node, Drill.CUT, as_json=as_json))


@local.command()
def heal(which: Drilled = None, node: OneNode = None, as_json: Json = False) -> None:
    """Undo `freeze` and `cut`."""
    from gpucloud.cli.drills import Drill, drill

    raise typer.Exit(drill(which, node, Drill.HEAL, as_json=as_json))


@local.command()
def weather(
    target: Target = None,
    seed: Annotated[int, typer.Option(help="Where the random times start.")] = 0,
    mean: Annotated[str, typer.Option(help="Mean time between interruptions, such as 30s.")] = "30s",
    unannounced: Annotated[float, typer.Option(min=0, max=1, help="Share of them without notice.")] = 0.0,
    as_json: Json = False,
) -> None:
    """Take nodes of the embedded fleet at random times, the same for the same seed."""
    from gpucloud.cli import drills

    raise typer.Exit(drills.weather(target, seed=seed, mean=mean, unannounced=unannounced, as_json=as_json))


@local.command()
def shortage(
    lasting: Annotated[str, typer.Argument(metavar="TIME", help="For how long, such as 5min; 0s ends it.")],
    as_json: Json = False,
) -> None:
    """Start no spot machines for a while, as a market that has none; those that run stay."""
    from gpucloud.cli import drills

    raise typer.Exit(drills.shortage(lasting, as_json=as_json))


@quota.command("show")
def quota_show(target: Target = None, as_json: Json = False) -> None:
    """Say what of the account's quotas a job needs, and what there is."""
    from gpucloud.cli import account

    raise typer.Exit(account.quota_show(target, as_json=as_json))


@quota.command("request")
def quota_request(
    target: Target = None,
    vcpus: Annotated[Optional[int], typer.Option(min=1, help="The limit to ask for; what the job needs.")] = None,  # noqa: UP045
    as_json: Json = False,
) -> None:
    """Ask AWS for as much as a job needs."""
    from gpucloud.cli import account

    raise typer.Exit(account.quota_request(target, vcpus=vcpus, as_json=as_json))


@quota.command("status")
def quota_status(target: Target = None, as_json: Json = False) -> None:
    """List what was asked for, and AWS's answer."""
    from gpucloud.cli import account

    raise typer.Exit(account.quota_status(target, as_json=as_json))


@iam.command("policy")
def iam_policy(
    target: Target = None,
    node: Annotated[bool, typer.Option("--node", help="The machines' policy instead of the caller's.")] = False,
    unattended: Annotated[bool, typer.Option("--unattended", help="That of machines that drive their job.")] = False,
) -> None:
    """Write the least policy that lets gpucloud work, as JSON."""
    from gpucloud.cli import account

    raise typer.Exit(account.iam_policy(target, node=node or unattended, unattended=unattended))


@tools.command("install")
def tools_install(as_json: Json = False) -> None:
    """Fetch Terraform into gpucloud's own folder: a pinned version, checked by its checksum."""
    from gpucloud.cli import account

    raise typer.Exit(account.tools_install(as_json=as_json))


@catalog.command("refresh")
def catalog_refresh(
    region: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Where; may be repeated. Your AWS region if left out."),
    ] = None,
    scores: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="GPU", help="AWS's placement scores of this model too; it gives few new ones a day."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Ask AWS for its GPU machines, where they are, list and spot prices; keep them for plans and `offers`."""
    from gpucloud.cli import account

    raise typer.Exit(account.catalog_refresh(tuple(region or ()), tuple(scores or ()), as_json=as_json))
