"""Commands that come in groups: the embedded cloud's, and those about an account rather than a job."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from gpucloud.cli.help import App, Below, Drilled, Json, JsonAlready, OneNode, Target

local = App(
    help="The embedded cloud: have it take and freeze machines, or run short of them.",
    cls=Below,
    rich_markup_mode=None,
    no_args_is_help=True,
)
quota = App(help="What the AWS account may rent.", cls=Below, rich_markup_mode=None, no_args_is_help=True)
iam = App(help="The rights that gpucloud needs on AWS.", cls=Below, rich_markup_mode=None, no_args_is_help=True)
catalog = App(help="Machines and list prices.", cls=Below, rich_markup_mode=None, no_args_is_help=True)
keys = App(help="Whose orders may start something here.", cls=Below, rich_markup_mode=None)
ci = App(help="gpucloud in a repository's CI.", cls=Below, rich_markup_mode=None, no_args_is_help=True)
tools = App(help="Programs that gpucloud calls.", cls=Below, rich_markup_mode=None, no_args_is_help=True)


@local.command()
def interrupt(
    which: Drilled = None,
    node: OneNode = None,
    rebalance: Annotated[bool, typer.Option("--rebalance", help="Only recommend to leave it.")] = False,
    as_json: Json = False,
) -> None:
    """Take a node of the embedded fleet, with a notice."""
    from gpucloud.cli.commands.machines import Drill, drill

    raise typer.Exit(drill(which, node, Drill.REBALANCE if rebalance else Drill.INTERRUPT, as_json=as_json))


@local.command()
def kill(which: Drilled = None, node: OneNode = None, as_json: Json = False) -> None:
    """Take a node of the embedded fleet without a notice: all of it is gone at once."""
    from gpucloud.cli.commands.machines import Drill, drill

    raise typer.Exit(drill(which, node, Drill.KILL, as_json=as_json))


@local.command()
def freeze(which: Drilled = None, node: OneNode = None, as_json: Json = False) -> None:
    """Stop everything on a node of the embedded fleet: it is there, is paid for, and answers nothing."""
    from gpucloud.cli.commands.machines import Drill, drill

    raise typer.Exit(drill(which, node, Drill.FREEZE, as_json=as_json))


@local.command()
def shortage(
    lasting: Annotated[str, typer.Argument(metavar="TIME", help="For how long, such as 5min; 0s ends it.")],
    as_json: Json = False,
) -> None:
    """Start no spot machines for a while, as a market that has none; those that run stay."""
    from gpucloud.cli.commands import machines

    raise typer.Exit(machines.shortage(lasting, as_json=as_json))


@quota.command("show")
def quota_show(target: Target = None, as_json: Json = False) -> None:
    """Say what of the account's quotas a job needs, and what there is."""
    from gpucloud.cli.commands import setting_up

    raise typer.Exit(setting_up.quota_show(target, as_json=as_json))


@quota.command("request")
def quota_request(
    target: Target = None,
    vcpus: Annotated[Optional[int], typer.Option(min=1, help="The limit to ask for; what the job needs.")] = None,  # noqa: UP045
    as_json: Json = False,
) -> None:
    """Ask AWS for as much as a job needs."""
    from gpucloud.cli.commands import setting_up

    raise typer.Exit(setting_up.quota_request(target, vcpus=vcpus, as_json=as_json))


@quota.command("status")
def quota_status(target: Target = None, as_json: Json = False) -> None:
    """List what was asked for, and AWS's answer."""
    from gpucloud.cli.commands import setting_up

    raise typer.Exit(setting_up.quota_status(target, as_json=as_json))


@iam.command("policy")
def iam_policy(  # noqa: PLR0913, PLR0917  each by its name
    target: Target = None,
    machines: Annotated[bool, typer.Option("--machines", help="The machines' policy instead of the caller's.")] = False,
    self_driving: Annotated[
        bool, typer.Option("--self-driving", help="That of machines that drive their job.")
    ] = False,
    boundary: Annotated[bool, typer.Option("--boundary", help="The boundary of the roles that are made.")] = False,
    no_boundary: Annotated[
        bool, typer.Option("--no-boundary", help="The caller's, without it: that makes an administrator.")
    ] = False,
    ci: Annotated[bool, typer.Option("--ci", help="The caller's without the making of roles.")] = False,
    kms_key: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="KEY", help="A KMS key of disks and store, by id or ARN; may be repeated."),
    ] = None,
    aws_account: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--account", metavar="ID", help="The AWS account's number; AWS is asked nothing then."),
    ] = None,
    region: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="REGION", help="The region; the job's, and without a job every one."),
    ] = None,
    as_json: JsonAlready = False,
) -> None:
    """Write the least policy that lets gpucloud work, as JSON; no credentials are needed."""
    del as_json
    from gpucloud.cli.commands import setting_up
    from gpucloud.domain.errors import UsageError

    asked = {
        setting_up.Whose.BOUNDARY: boundary,
        setting_up.Whose.UNBOUNDED: no_boundary,
        setting_up.Whose.CI: ci,
        setting_up.Whose.DRIVER: self_driving,
        setting_up.Whose.NODE: machines and not self_driving,
    }
    chosen = [whose for whose, is_asked in asked.items() if is_asked]
    if len(chosen) > 1:
        raise UsageError(
            "one policy at a time: --machines, --self-driving, --boundary, --no-boundary or --ci",
            hint="leave the others out",
        )
    whose = chosen[0] if chosen else setting_up.Whose.CALLER
    raise typer.Exit(setting_up.iam_policy(target, whose, tuple(kms_key or ()), account=aws_account, region=region))


@keys.callback(invoke_without_command=True)
def keys_show(context: typer.Context, as_json: Json = False) -> None:
    """Show your signing key, for others to trust, and the keys that are trusted here; add or revoke one."""
    from gpucloud.cli.commands import setting_up as command

    if context.invoked_subcommand is None:
        raise typer.Exit(command.keys_show(as_json=as_json))


@keys.command("add")
def keys_add(
    name: Annotated[str, typer.Argument(help="Whose key it is.")],
    key: Annotated[str, typer.Argument(help="Their line, 'ssh-ed25519 AAAA…', or a file with it.")],
    as_json: Json = False,
) -> None:
    """Trust a key: what it signed may be started and gone on with from here."""
    from gpucloud.cli.commands import setting_up as command

    raise typer.Exit(command.keys_add(name, key, as_json=as_json))


@keys.command("revoke")
def keys_revoke(
    which: Annotated[str, typer.Argument(metavar="NAME|KEY", help="Whose, or the key; `own`: yours, for a new one.")],
    as_json: Json = False,
) -> None:
    """Trust a key no longer."""
    from gpucloud.cli.commands import setting_up as command

    raise typer.Exit(command.keys_revoke(which, as_json=as_json))


@ci.command("init")
def ci_init(
    github: Annotated[bool, typer.Option("--github", help="For GitHub Actions.")] = False,
    gitlab: Annotated[bool, typer.Option("--gitlab", help="For GitLab CI.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite what was edited.")] = False,
    as_json: Json = False,
) -> None:
    """Put a pipeline into this repository, and beside it all that it installs: gpucloud's wheel, a lock by hash."""
    from gpucloud.cli.commands import setting_up as command

    raise typer.Exit(command.init_ci(github=github, gitlab=gitlab, force=force, as_json=as_json))


@tools.command("install")
def tools_install(as_json: Json = False) -> None:
    """Fetch Terraform into gpucloud's own folder: a pinned version, checked by its checksum."""
    from gpucloud.cli.commands import setting_up

    raise typer.Exit(setting_up.tools_install(as_json=as_json))


@catalog.command("refresh")
def catalog_refresh(
    region: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="REGION", help="Where; may be repeated. Your AWS region if left out."),
    ] = None,
    scores: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="GPU", help="AWS's placement scores of this model too; it gives few new ones a day."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Ask AWS for its GPU machines, where they are, list and spot prices; keep them for plans and `offers`."""
    from gpucloud.cli.commands import setting_up

    raise typer.Exit(setting_up.catalog_refresh(tuple(region or ()), tuple(scores or ()), as_json=as_json))
