"""Before and beside a job: what helps to write its file and to choose machines, and what keeps an account clean."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from gpucloud.cli.help import App, Json, JsonAlready, Shell, Target, completion_script, named, topics
from gpucloud.domain.job.spec import Cloud, MarketPolicy, Policy
from gpucloud.domain.market.listing import Order, Query

choosing = App(rich_markup_mode=None)
"""Part of the root: their commands stand beside its own."""

Recordings = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--recording", metavar="NAME", help="A recorded market; may be repeated."),
]
ZoneSets = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--zones", metavar="ZONES", help="Zones or regions (a,b) that the job may use; may be repeated."),
]
Policies = Annotated[
    Optional[list[Policy]],  # noqa: UP045
    typer.Option("--policy", help="How to choose between spot and on demand; all if left out."),
]
Work = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(metavar="TIME", help="How long the job takes undisturbed, such as 48h; the job file's `work:`."),
]
Deadline = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(metavar="TIME", help="Another deadline than the job file's."),
]
Budget = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(metavar="SUM", help="Another budget than the job file's, such as '160 USD'."),
]
OnDemandPrice = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        metavar="SUM",
        help="What your machine costs an hour on demand; on AWS the catalog's price, else the recorded one's.",
    ),
]
RestartTime = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--restart",
        metavar="TIME",
        help="From a launch to the first step; as long as `plan` takes it to be if left out: 10min, on the embedded"
        " fleet 15s.",
    ),
]
Plotted = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(metavar="FILE", help="Draw the costs, or with --sweep costs against deadlines: .png or .svg."),
]


@choosing.command()
def init(  # noqa: PLR0913, PLR0917  each is an option
    name: Annotated[Optional[str], typer.Argument(help="The job's name; this folder's if left out.")] = None,  # noqa: UP045
    template: Annotated[Optional[str], typer.Option(help="A whole job, its script too, to begin with.")] = None,  # noqa: UP045
    run: Annotated[Optional[str], typer.Option(metavar="SCRIPT", help="What it runs; the script here.")] = None,  # noqa: UP045
    full: Annotated[bool, typer.Option("--full", help="With every key, each explained.")] = False,
    show: Annotated[bool, typer.Option("--list", help="Only list the templates.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")] = False,
    as_json: Json = False,
) -> None:
    """Write a job file, gpucloud.yaml."""
    from gpucloud.cli.commands import setting_up

    if show:
        raise typer.Exit(setting_up.templates(as_json=as_json))
    request = setting_up.InitRequest(name=name, template=template, run=run, full=full, force=force)
    raise typer.Exit(setting_up.init(request, as_json=as_json))


@choosing.command()
def simulate(  # noqa: PLR0913, PLR0917  each is an option
    target: Target = None,
    market: Recordings = None,
    zones: ZoneSets = None,
    policy: Policies = None,
    work: Work = None,
    deadline: Deadline = None,
    budget: Budget = None,
    price: OnDemandPrice = None,
    restart: RestartTime = None,
    notice: Annotated[
        bool, typer.Option(help="Machines are interrupted with notice, of two minutes in a cloud.")
    ] = True,
    windows: Annotated[int, typer.Option(min=1, max=10000, help="How often the job is replayed.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Where the random moments of submission start.")] = 0,
    sweep: Annotated[bool, typer.Option("--sweep", help="Other deadlines too, from the tightest possible.")] = False,
    plot: Plotted = None,
    show: Annotated[bool, typer.Option("--list", help="Only list the recorded markets.")] = False,
    as_json: Json = False,
) -> None:
    """Rehearse a job on recorded spot markets: cost, deadlines, interruptions; nothing is made."""
    from gpucloud.cli.commands import simulate as command
    from gpucloud.cli.faults import moved_on_the_line

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
    with moved_on_the_line(budget=budget, deadline=deadline):
        raise typer.Exit(command.rehearse(target, asked, as_json=as_json))


@choosing.command()
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
        typer.Option(metavar="REGION", help="Where; may be repeated. Those with known list prices if left out."),
    ] = None,
    market: Annotated[
        Optional[MarketPolicy],  # noqa: UP045
        typer.Option(help="Which price counts; auto: the lower one. The job's if left out, else auto."),
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


@choosing.command()
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


@choosing.command()
def gc(
    cloud: Annotated[
        Optional[list[Cloud]],  # noqa: UP045
        typer.Option("--cloud", help="Where; the embedded fleet, and AWS if jobs ran there. Own hosts have none."),
    ] = None,
    region: Annotated[list[str] | None, typer.Option(metavar="REGION", help="On AWS, where; may be repeated.")] = None,
    store: Annotated[str | None, typer.Option(metavar="STORE", help="Of jobs in this store; all known ones.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove what was seen twice, a minute apart.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Look again after that minute.")] = False,
    as_json: Json = False,
) -> None:
    """List what bears gpucloud's tags and belongs to no living job; remove it on request."""
    from gpucloud.cli.commands import machines

    clouds, regions = tuple(cloud or ()), tuple(region or ())
    asked = machines.Sweep(clouds=clouds, regions=regions, store=store, delete=yes, wait=wait)
    raise typer.Exit(machines.gc(asked, as_json=as_json))


@choosing.command()
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


@choosing.command()
def schema(as_json: JsonAlready = False) -> None:
    """Write the JSON Schema of job files."""
    del as_json
    from gpucloud.cli.commands import setting_up

    raise typer.Exit(setting_up.schema())


@choosing.command()
def completion(
    shell: Annotated[Shell, typer.Argument(help="Whose: bash, zsh or fish.")],
) -> None:
    """Write what a shell completes commands, options, jobs and job files by."""
    from gpucloud.cli.render.words import say

    say(completion_script(shell))
