"""The typer root: commands and options. What a command does is imported when it runs, so that `--help` is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from gpucloud import __version__
from gpucloud.cli.arguments import Json, JsonAlready, OnCloud, Shell, Target, named, topics
from gpucloud.cli.groups import catalog, ci, iam, keys, local, quota, tools
from gpucloud.cli.help import App, Group
from gpucloud.domain.job.spec import Cloud, MarketPolicy, Policy
from gpucloud.domain.market.listing import Order, Query

app = App(
    name="gpucloud",
    cls=Group,
    help="Train models on interruptible cloud GPUs, inside a budget that cannot be exceeded.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(local, name="local")
app.add_typer(quota, name="quota")
app.add_typer(iam, name="iam")
app.add_typer(catalog, name="catalog")
app.add_typer(tools, name="tools")
app.add_typer(ci, name="ci")
app.add_typer(keys, name="keys")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"gpucloud {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say the version and leave.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Write a traceback of our own faults to the log.")] = False,
) -> None:
    """Train models on interruptible cloud GPUs, inside a budget that cannot be exceeded."""
    del version, debug


@app.command()
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
    from gpucloud.cli.commands import planning

    raise typer.Exit(planning.plan(target, on=cloud, plot=plot, as_json=as_json))


@app.command()
def simulate(  # noqa: PLR0913, PLR0917  each is an option
    target: Target = None,
    market: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--recording", metavar="NAME", help="A recorded market; may be repeated."),
    ] = None,
    zones: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--zones", metavar="ZONES", help="Zones or regions (a,b) that the job may use; may be repeated."),
    ] = None,
    policy: Annotated[
        Optional[list[Policy]],  # noqa: UP045
        typer.Option("--policy", help="How to choose between spot and on demand; all if left out."),
    ] = None,
    work: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="TIME", help="How long the job takes undisturbed, such as 48h; the job file's `work:`."),
    ] = None,
    deadline: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="TIME", help="Another deadline than the job file's."),
    ] = None,
    budget: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="SUM", help="Another budget than the job file's, such as '160 USD'."),
    ] = None,
    price: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="SUM",
            help="What your machine costs an hour on demand; on AWS the catalog's price, else the recorded one's.",
        ),
    ] = None,
    restart: Annotated[str, typer.Option(metavar="TIME", help="From a launch to the first step.")] = "10min",
    notice: Annotated[bool, typer.Option(help="Machines are interrupted with two minutes' notice.")] = True,
    windows: Annotated[int, typer.Option(min=1, max=10000, help="How often the job is replayed.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Where the random moments of submission start.")] = 0,
    sweep: Annotated[bool, typer.Option("--sweep", help="Other deadlines too, from the tightest possible.")] = False,
    plot: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", help="Draw the costs, or with --sweep costs against deadlines: .png or .svg."),
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="Only list the recorded markets.")] = False,
    as_json: Json = False,
) -> None:
    """Rehearse a job on recorded spot markets: cost, deadlines, interruptions; nothing is made."""
    from gpucloud.cli.commands import simulate as command

    if show:
        raise typer.Exit(command.list_markets(as_json=as_json))
    asked = command.Asked(
        markets=tuple(market or ()),
        zones=tuple(zones or ()),
        policies=tuple(policy or ()),
        work=work,
        deadline=deadline,
        budget=budget,
        price=price,
        restart=restart,
        notice=notice,
        windows=windows,
        seed=seed,
        sweep=sweep,
        plot=plot,
    )
    raise typer.Exit(command.rehearse(target, asked, as_json=as_json))


@app.command()
def offers(  # noqa: PLR0913, PLR0917  each is an option
    target: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(
            metavar="[JOB|FILE]",
            help="A job whose `resources` are asked for; every machine if left out.",
            autocompletion=named,
        ),
    ] = None,
    gpu: Annotated[Optional[list[str]], typer.Option(help="A GPU model, such as H100; may be repeated.")] = None,  # noqa: UP045
    gpus: Annotated[Optional[int], typer.Option(min=1, help="GPUs in a machine, at least.")] = None,  # noqa: UP045
    vram: Annotated[Optional[int], typer.Option(min=1, metavar="GB", help="Memory of each GPU, at least.")] = None,  # noqa: UP045
    network_gbps: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(min=0, help="What the network carries for hours, at least."),
    ] = None,
    efa: Annotated[bool, typer.Option("--efa", help="With an Elastic Fabric Adapter.")] = False,
    nvlink: Annotated[bool, typer.Option("--nvlink", help="GPUs joined by NVLink.")] = False,
    region: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Where; may be repeated. Those with known list prices if left out."),
    ] = None,
    market: Annotated[
        Optional[MarketPolicy],  # noqa: UP045
        typer.Option(help="Which price counts; auto: the lower one."),
    ] = None,
    max_price: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="USD", help="What a machine may cost an hour, such as 4.50."),
    ] = None,
    sort: Annotated[Order, typer.Option(help="What comes first.")] = Order.PRICE,
    limit: Annotated[int, typer.Option(min=0, help="Rows of the table; 0: all.")] = 20,
    offline: Annotated[bool, typer.Option("--offline", help="Ask nobody: the catalog as it is here.")] = False,
    as_json: Json = False,
) -> None:
    """List the GPU machines that AWS rents, with prices, best first; needs no account."""
    from gpucloud.cli.commands import offers as command

    query = Query(
        gpu=tuple(gpu or ()),
        gpus=gpus,
        vram_gib=vram,
        network_gbps=network_gbps,
        efa=efa,
        nvlink=nvlink,
        regions=tuple(region or ()),
    )
    asked = command.Asked(
        target=target, query=query, market=market, max_price=max_price, order=sort, limit=limit, offline=offline
    )
    raise typer.Exit(command.offers(asked, as_json=as_json))


@app.command()
def up(target: Target = None, cloud: OnCloud = None, as_json: Json = False) -> None:
    """Start the job's machines, prepaid and prepared, without training."""
    from gpucloud.cli.commands import training

    raise typer.Exit(training.up(target, on=cloud, as_json=as_json))


@app.command()
def train(  # noqa: PLR0913, PLR0917  each is an option
    target: Target = None,
    cloud: OnCloud = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the machines up at the end, while they are paid, for a look at them.")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when the machines are there; they drive the job.")
    ] = False,
    unattended: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="TIME", help="Machines drive the job, prepaid for TIME (8h); nothing here need run."),
    ] = None,
    drill: Annotated[bool, typer.Option("--drill", help="Have one machine interrupted once, in mid-run.")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Record a few steps of each rank.")] = False,
    profile_steps: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, max=1000, metavar="STEPS", help="As --profile, and how many; 5 if left out."),
    ] = None,
    verify_resume: Annotated[
        bool, typer.Option("--verify-resume", help="Prove on two short runs that the script resumes to the bit.")
    ] = False,
    verify_steps: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            min=4, max=1000, metavar="STEPS", help="As --verify-resume, and of how many steps; 8 if left out."
        ),
    ] = None,
    budget: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--budget", metavar="SUM", help="Another budget than the job file's, such as '40 USD'."),
    ] = None,
    adopt: Annotated[bool, typer.Option("--adopt", help="Go on with a run that another job file began.")] = False,
    as_json: Json = False,
) -> None:
    """Run a job to its end, or continue it: machines, code, training, interruptions, teardown, cost."""
    from gpucloud.cli.commands import budgeting, training

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
        total = budgeting.sum_of(budget)
        asked_steps = verify_steps or STEPS
        raise typer.Exit(verifying.verify_resume(target, asked_steps, on=cloud, budget_usd=total, as_json=as_json))
    steps = profile_steps or (5 if profile else None)
    asked = training.Asked(
        keep=keep,
        detach=detach,
        drill=drill,
        profile_steps=steps,
        unattended=unattended,
        budget_usd=budgeting.sum_of(budget),
        adopts=adopt,
    )
    raise typer.Exit(training.train(target, asked, on=cloud, as_json=as_json))


@app.command()
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


@app.command()
def watch(
    target: Target = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Show a job's GPUs, steps and money until it ends; Ctrl-C leaves the job alone."""
    from gpucloud.cli.commands import asking

    raise typer.Exit(asking.watch(target, as_json=as_json))


@app.command()
def metrics(
    target: Target = None,
    node: Annotated[Optional[str], typer.Option(help="Which node; the first if left out.")] = None,  # noqa: UP045
) -> None:
    """Write a machine's figures as Prometheus reads them."""
    from gpucloud.cli.commands import asking

    raise typer.Exit(asking.metrics(target, node))


@app.command()
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
    from gpucloud.cli.commands import costing

    asked = costing.Asked(by=by, since=since, to=to, every=every)
    if reconcile:
        from gpucloud.cli.commands import costing

        costing.require_one(targets or (), asked)
        raise typer.Exit(costing.reconcile(targets[0] if targets else None, as_json=as_json))
    raise typer.Exit(costing.cost(targets or (), asked, as_json=as_json))


@app.command()
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
    from gpucloud.cli.commands import budgeting

    job, wanted = budgeting.meant(words or [])
    raise typer.Exit(budgeting.budget(job, wanted, as_json=as_json))


@app.command()
def doctor(
    target: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(
            metavar="[JOB|FILE]", help="A job's live machines; this machine if left out.", autocompletion=named
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full/--quick", help="Put GPUs to work too; not while a job uses them.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say whether machines and their GPUs are fit: this one, or those of a job."""
    from gpucloud.cli.commands import machines as asked

    raise typer.Exit(asked.doctor(target, full=full, as_json=as_json))


@app.command()
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
    from gpucloud.cli.commands import asking
    from gpucloud.cli.commands import logs as output

    if launch:
        raise typer.Exit(asking.launches(target, attempt=attempt))
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


@app.command()
def ssh(
    target: Target = None,
    command: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="COMMAND...", help="Run this: `hostname`, -- nvidia-smi -L, or 'cd /data; ls'."),
    ] = None,
    node: Annotated[Optional[str], typer.Option(help="Which node; the first if left out.")] = None,  # noqa: UP045
) -> None:
    """Open a shell on a machine, or run a command."""
    from gpucloud.cli.commands import asking

    raise typer.Exit(asking.ssh(target, node, tuple(command or ())))


@app.command()
def cp(
    source: Annotated[str, typer.Argument(metavar="FROM", help="A path here, or JOB:path on a machine.")],
    target: Annotated[str, typer.Argument(metavar="TO", help="The other of the two.")],
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="Folders too.")] = False,
    node: Annotated[Optional[str], typer.Option(help="Which node; that of rank 0 if left out.")] = None,  # noqa: UP045
    as_json: Json = False,
) -> None:
    """Copy files to or from a job's machines; JOB:path starts in the job's code folder, JOB:@store/ is its store."""
    from gpucloud.cli.commands import copying

    raise typer.Exit(copying.copy(source, target, node=node, recursive=recursive, as_json=as_json))


@app.command()
def checkpoints(  # noqa: PLR0913, PLR0917  each is an option
    target: Target = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every byte; says each object that is damaged.")
    ] = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="Show what retention does not keep; --yes deletes it.")
    ] = False,
    pull: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="DIR", help="Bring one to a folder that GPUCLOUD_STORE=DIR resumes from."),
    ] = None,
    export: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", help="Write the model's weights as one safetensors file."),
    ] = None,
    step: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=0, help="Which one; what a restore takes first if left out."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--with-state", help="With --export: optimizer and other state too.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --prune: delete.")] = False,
    as_json: Json = False,
) -> None:
    """List a job's checkpoints; verify them, delete old ones, bring one here."""
    from gpucloud.cli.commands import checkpoints as command

    asked = command.Asked(
        verify=verify, prune=prune, pull=pull, export=export, step=step, everything=everything, yes=yes
    )
    raise typer.Exit(command.checkpoints(target, asked, as_json=as_json))


@app.command()
def down(
    target: Target = None,
    base: Annotated[bool, typer.Option("--base", help="End what stands on AWS without any job.")] = False,
    region: Annotated[Optional[str], typer.Option(help="With --base: where.")] = None,  # noqa: UP045
    with_data: Annotated[bool, typer.Option("--with-data", help="With --base: the bucket too, and all in it.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --with-data: delete without asking.")] = False,
    as_json: Json = False,
) -> None:
    """Save and end a job, end its machines, and show that nothing is left."""
    if base:
        from gpucloud.cli.commands import account

        raise typer.Exit(account.end_base(region, with_data=with_data, yes=yes, as_json=as_json))
    from gpucloud.cli.commands import ending

    raise typer.Exit(ending.down(target, as_json=as_json))


@app.command()
def rm(
    target: Target = None,
    with_checkpoints: Annotated[bool, typer.Option("--with-checkpoints", help="Its checkpoints too.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
    as_json: Json = False,
) -> None:
    """Delete what is kept of a job that is over."""
    from gpucloud.cli.commands import ending

    raise typer.Exit(ending.rm(target, with_checkpoints=with_checkpoints, yes=yes, as_json=as_json))


@app.command()
def reconcile(
    target: Target = None,
    every: Annotated[bool, typer.Option("--all", help="Every job that is not torn down.")] = False,
    store: Annotated[Optional[str], typer.Option(help="With --all: every job in this store too.")] = None,  # noqa: UP045
    as_json: Json = False,
) -> None:
    """Make one pass for a job and leave: for cron and CI schedules."""
    from gpucloud.cli.commands import passes

    if every or store:
        raise typer.Exit(passes.reconcile_all(store, as_json=as_json))
    raise typer.Exit(passes.reconcile(target, as_json=as_json))


@app.command()
def gc(
    cloud: Annotated[
        Optional[list[Cloud]],  # noqa: UP045
        typer.Option("--cloud", help="Where; the embedded fleet, and AWS if jobs ran there."),
    ] = None,
    region: Annotated[Optional[list[str]], typer.Option(help="On AWS, where; may be repeated.")] = None,  # noqa: UP045
    store: Annotated[Optional[str], typer.Option(help="Of jobs in this store; all known ones.")] = None,  # noqa: UP045
    yes: Annotated[bool, typer.Option("--yes", help="Remove what was seen twice, a minute apart.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Look again after that minute.")] = False,
    as_json: Json = False,
) -> None:
    """List what bears gpucloud's tags and belongs to no living job; remove it on request."""
    from gpucloud.cli.commands import machines

    clouds, regions = tuple(cloud or ()), tuple(region or ())
    asked = machines.Sweep(clouds=clouds, regions=regions, store=store, delete=yes, wait=wait)
    raise typer.Exit(machines.gc(asked, as_json=as_json))


@app.command()
def init(  # noqa: PLR0913, PLR0917  each is an option
    name: Annotated[Optional[str], typer.Argument(help="The job's name; this folder's if left out.")] = None,  # noqa: UP045
    template: Annotated[Optional[str], typer.Option(help="A whole job, its script too, to begin with.")] = None,  # noqa: UP045
    run: Annotated[Optional[str], typer.Option(metavar="SCRIPT", help="What it runs; the script here.")] = None,  # noqa: UP045
    full: Annotated[bool, typer.Option("--full", help="With every key, each explained.")] = False,
    show: Annotated[bool, typer.Option("--list", help="Only list the templates.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
    as_json: Json = False,
) -> None:
    """Write a job file, gpucloud.yaml."""
    from gpucloud.cli.commands import writing

    if show:
        raise typer.Exit(writing.templates(as_json=as_json))
    wish = writing.Wish(name=name, template=template, run=run, full=full, force=force)
    raise typer.Exit(writing.init(wish, as_json=as_json))


@app.command()
def docs(
    words: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(
            metavar="[TOPIC]...",
            help="A page, or a section such as exit codes; all pages are listed if left out.",
            autocompletion=topics,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the pages of the handbook, or show one here."""
    from gpucloud.cli.commands import reading

    raise typer.Exit(reading.docs(words or (), as_json=as_json))


@app.command()
def schema(as_json: JsonAlready = False) -> None:
    """Write the JSON Schema of job files."""
    del as_json
    from gpucloud.cli.commands import writing

    raise typer.Exit(writing.schema())


@app.command()
def completion(
    shell: Annotated[Shell, typer.Argument(help="Whose: bash, zsh or fish.")],
) -> None:
    """Write what a shell completes commands, options, jobs and job files by."""
    from gpucloud.cli import completing

    raise typer.Exit(completing.completion(shell.value))
