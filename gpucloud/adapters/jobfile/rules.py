"""Rules that one value alone cannot answer: they look at two keys, or for a start at the disk beside the job file.

They look at the raw values, so that their faults are found together with the others.
"""

from __future__ import annotations

import difflib
import json
import os
import posixpath
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpucloud.adapters.jobfile import values
from gpucloud.adapters.jobfile.values import Fault, nearest
from gpucloud.adapters.jobfile.values import Path as Key
from gpucloud.adapters.scripts import Started, is_there, started_by
from gpucloud.adapters.transfer.localfiles import kept_at_home_by
from gpucloud.domain.errors import UsageError
from gpucloud.domain.job.spec import CHECKPOINT, Cloud
from gpucloud.domain.node.container import OF_THE_CLIENT
from gpucloud.domain.node.layer import only_installs
from gpucloud.domain.node.member import needs_shell
from gpucloud.domain.node.status import MOST_PATTERNS
from gpucloud.domain.untrusted import quoted
from gpucloud.domain.variables import GPUCLOUD_RESUME_ARGS

_OF_A_DIRECTORY = ("layout", "done_file", "on_notice", "settle", "per_node", "resume_args", "resume_variables")
_PLACEHOLDER = re.compile(r"\{[A-Za-z_]+\}")
_NAMES_A_SCRIPT = re.compile(r"(.*?\.py)(\s.*|$)")
_IN_LINE = re.compile(rf"\$(?:{GPUCLOUD_RESUME_ARGS}\b|\{{{GPUCLOUD_RESUME_ARGS}\b)")
_QUOTED_IN_LINE = re.compile(rf"[\"']\$\{{?{GPUCLOUD_RESUME_ARGS}\}}?[\"']")
_OF_A_SCRIPT = re.compile(r"\.py\b(?:(?!\s\d?[<>])[^|;&<>\n])*")
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)")
_OWNED = [cloud.value for cloud in Cloud if cloud.traits.owned]
_SHOWN = 3
KEY = "[key]"  # at the end of a path: the key itself, as pydantic writes it
Report = Callable[[Key, str], Fault]


def broken(root: Mapping[str, Any], fault: Report) -> Iterator[Fault]:
    """Yield what is wrong between keys."""
    yield from _run(root, fault)
    yield from _conda(root, fault)
    yield from _store(root, fault)
    yield from _alert(root, fault)
    yield from _checkpoint(root, fault)
    yield from _resume(root, fault)
    yield from _model(root, fault)
    yield from _policy(root, fault)
    yield from _data(root, fault)
    yield from _metrics(root, fault)
    yield from _secrets(root, fault)
    yield from _launcher(root, fault)
    yield from _image(root, fault)
    yield from _hosts(root, fault)


def missing(root: Mapping[str, Any], folder: Path, fault: Report) -> Iterator[Fault]:
    """Yield what a start takes of the file's `folder`, and what is not there; a job that runs has it already."""
    yield from _code_here(root, folder, fault)
    yield from _data_here(root, folder, fault)
    yield from _keys_here(root, folder, fault)


def no_regions(root: Mapping[str, Any], require_region: Callable[[str], None], fault: Report) -> Iterator[Fault]:
    """Yield what a job on AWS names as its regions and `require_region` raises UsageError for."""
    section = root.get("resources")
    regions = section.get("regions") if isinstance(section, dict) and root.get("cloud") == "aws" else None
    for at, name in enumerate(regions if isinstance(regions, list) else [regions]):
        if not isinstance(name, str):
            continue
        try:
            require_region(name)
        except UsageError as error:
            yield replace(fault(("resources", "regions", at), error.message), hint=error.hint)


def beside(folder: Path, written: str) -> Path:
    """Return the absolute path of what a job file names: relative to its folder, `~` being the home folder."""
    return Path(os.path.abspath(folder / os.path.expanduser(written)))  # noqa: PTH100, PTH111  these never raise


def script_of(run: str) -> str | None:
    """Return the Python script that `run` starts, or None when it is a command line."""
    try:
        words = shlex.split(run)
    except ValueError:
        words = run.split(maxsplit=1)
    return words[0] if words and words[0].endswith(".py") else None


def _run(root: Mapping[str, Any], fault: Report) -> Iterator[Fault]:
    run = root.get("run")
    if not isinstance(run, str):
        return
    script = script_of(run)
    if "\n" not in run.strip() or script is not None:
        try:
            shlex.split(run)
        except ValueError:
            yield fault(("run",), f"{quoted(run)} has a quote that is never closed")
            return
    if script is not None and needs_shell(run):
        yield fault(("run",), f"{quoted(run)}: a script gets no shell; put 'single quotes' around $ ` * ? ; | # …")
    elif script is not None and (script.startswith("/") or ".." in script.split("/")):
        yield fault(("run",), f"{quoted(script)} is not a script inside the code folder")


def _code_here(root: Mapping[str, Any], folder: Path, fault: Report) -> Iterator[Fault]:
    code = root.get("code", ".")
    if not isinstance(code, str):
        return
    place = beside(folder, code)
    if not _is_folder(place):
        if "code" in root:
            yield fault(("code",), f"there is no folder {quoted(code)} beside the job file")
        return
    if isinstance(root.get("run"), str):
        yield from _run_here(root, root["run"], place, fault)
    conda = root.get("conda")
    if isinstance(conda, str) and root.get("image") is None and not os.path.isfile(place / conda):  # noqa: PTH113  never raises
        yield fault(("conda",), f"there is no file {quoted(conda)} in the code folder")


def _run_here(root: Mapping[str, Any], run: str, place: Path, fault: Report) -> Iterator[Fault]:
    script, setup = script_of(run), root.get("setup")
    made = isinstance(setup, str) and not only_installs(setup)  # by what runs before the script
    if script is None:
        yield from _unquoted(run, place, fault)
        started = started_by(run)
        elsewhere = root.get("image") is not None or root.get("cloud") in _OWNED
        if started is not None and (started.sure or not elsewhere):
            yield from _started(run, started, place, fault, made=made)
    elif os.path.isfile(place / script):  # noqa: PTH113  answers False for every name that no file can have
        yield from _kept_at_home(script, place, fault, made=made)
    elif not made:
        yield _missing("script", script, place, fault)


def _started(run: str, started: Started, place: Path, fault: Report, *, made: bool) -> Iterator[Fault]:
    """What a command line starts, as far as that is surely a file of the code."""
    file = place / started.path
    if started.itself and not started.sure and os.path.isfile(file):  # noqa: PTH113  never raises
        told = fault(("run",), f"{quoted(started.path)} is a file here, and without a path is looked for as a command")
        yield replace(told, hint=f"run: bash {run.strip()}")
    elif not is_there(place, started):
        if not made:
            yield _missing("file", started.path, place, fault)
    elif os.path.isfile(file):  # noqa: PTH113  never raises
        yield from _kept_at_home(started.path, place, fault, made=made)
        if started.itself and not made and not os.access(file, os.X_OK):
            told = fault(("run",), f"{quoted(started.path)} may not be executed")
            yield replace(told, hint=f"chmod +x {shlex.quote(started.path)}")


def _missing(kind: str, path: str, place: Path, fault: Report) -> Fault:
    told = fault(("run",), f"there is no {kind} {quoted(path)} in the code folder")
    ending = os.path.splitext(path)[1]  # noqa: PTH122  of any text
    here = "./" if path.startswith("./") else ""
    there = sorted(here + name for name in _files_beside(place / path, place, ending))
    folder = "`code:` names its folder" + ("; gpucloud init --list" if kind == "script" else "")
    others = f"there is {', '.join(there[:_SHOWN])}" if there else folder
    return replace(told, hint=nearest(path, there) or others)


def _kept_at_home(path: str, place: Path, fault: Report, *, made: bool) -> Iterator[Fault]:
    """A file that an ignore file names is on no machine."""
    by = None if made else kept_at_home_by(place, posixpath.normpath(path))
    if by is not None:
        told = fault(("run",), f"{quoted(path)} is not sent to machines: {by} keeps it here")
        yield replace(told, hint=f"take it out of {by}" if by != "gpucloud" else "move it to another folder")


def _unquoted(run: str, place: Path, fault: Report) -> Iterator[Fault]:
    """A script whose name is several words would be taken for a command and its words."""
    found = _NAMES_A_SCRIPT.match(run.strip())
    if found is not None and os.path.isfile(place / found[1]):  # noqa: PTH113  never raises
        taken = quoted(found[1].split()[0])
        told = fault(
            ("run",), f"{quoted(found[1])} is a script here, and without quotes {taken} is taken for a command"
        )
        yield replace(told, hint=f"run: {json.dumps(shlex.quote(found[1]) + found[2], ensure_ascii=False)}")


def _files_beside(file: Path, code: Path, ending: str) -> list[str]:
    """Return the files with that ending of the folder in which that one would be, as `run` names them."""
    try:
        there = (
            one
            for one in file.parent.glob(f"*{ending}")
            if one.is_file() and one.suffix == ending and one.name[0] != "."
        )
        return [str(one.relative_to(code)) for one in there]
    except (OSError, ValueError):
        return []


def _conda(root: Mapping[str, Any], fault: Report) -> Iterator[Fault]:
    conda = root.get("conda")
    if not isinstance(conda, str) or root.get("image") is not None:  # it has no place there at all
        return
    if conda.startswith("/") or ".." in conda.split("/"):
        yield fault(("conda",), f"{quoted(conda)} is not a file inside the code folder")


def _store(root: Mapping[str, Any], fault: Report) -> Iterator[Fault]:
    store = root.get("store")
    if root.get("cloud") == "aws" and isinstance(store, str) and not store.startswith("s3://"):
        yield fault(("store",), "must be s3://bucket/prefix for cloud: aws, since nodes cannot reach a folder here")


def _alert(root: Mapping[str, Any], fault: Report) -> Iterator[Fault]:
    """The alarm is a part of the base, which is not made where the network is the user's own."""
    section = root.get("aws")
    if isinstance(section, dict) and section.get("subnets"):
        for key in ("alert_email", "alert_topic"):
            if section.get(key) is not None:
                told = fault(("aws", key, KEY), "is made with gpucloud's own network alone, and `subnets` names yours")
                yield replace(told, hint="leave it out, and make a budget in AWS's Billing console")


def _checkpoint(root: Mapping[str, Any], fault: Report) -> Iterator[Fault]:
    """A script either saves by `gpucloud.resume`, when `every` says so, or by itself into a directory."""
    section, resources = root.get("checkpoint"), root.get("resources")
    if not isinstance(section, dict):
        return
    if section.get("directory") is None:
        for key in _OF_A_DIRECTORY:
            if section.get(key) is not None:
                yield fault(("checkpoint", key, KEY), "is of a script's own `directory`, and none is named")
        return
    if section.get("every") not in (None, "auto"):
        yield fault(("checkpoint", "every"), "cannot be with `directory`: there the script decides when it saves")
    layout = section.get("layout")
    if section.get("done_file") is not None and layout not in (None, "auto"):
        yield fault(("checkpoint", "done_file"), f"is in place of a layout, and {quoted(str(layout))} is named")
    if section.get("per_node") is not True:
        if layout == "dcp" and _most_nodes(resources) > 1:
            text = "each of several nodes writes a part of its own, and node 0's alone is kept: add `per_node: true`"
            yield fault(("checkpoint", "layout"), text)
    elif layout in ("lightning", "file"):
        text = f"needs folders whose names end with the step, and `layout: {layout}` is of single files"
        yield fault(("checkpoint", "per_node"), text)


def _resume(root: Mapping[str, Any], fault: Report) -> Iterator[Fault]:
    """What is added after a checkpoint was put back must have a place on the line, and mean what it seems to."""
    section, run = root.get("checkpoint"), root.get("run")
    if not isinstance(section, dict) or section.get("directory") is None:
        return
    variables = section.get("resume_variables")
    for name, value in variables.items() if isinstance(variables, dict) else ():
        if name in OF_THE_CLIENT:
            yield fault(("checkpoint", "resume_variables", name, KEY), "is what programs are started by: not there")
        yield from _placeholders(str(value), fault, ("checkpoint", "resume_variables", name))
    try:
        args = values.words(section.get("resume_args"))
    except ValueError:
        return
    yield from _placeholders(" ".join(args), fault, ("checkpoint", "resume_args"))
    if isinstance(run, str) and script_of(run) is None and needs_shell(run):
        yield from _in_shell(run, args, fault)


def _placeholders(written: str, fault: Report, key: Key) -> Iterator[Fault]:
    for found in _PLACEHOLDER.findall(written):
        if found != CHECKPOINT and (near := difflib.get_close_matches(found.lower(), (CHECKPOINT,))):
            yield replace(fault(key, f"{quoted(found)} stands for nothing"), hint=f'did you mean "{near[0]}"?')


def _with_words(run: str) -> str:
    """Return the line with the words behind those of its last Python script, before what a pipe or a file gets."""
    found = list(_OF_A_SCRIPT.finditer(run))
    at = len(run[: found[-1].end()].rstrip()) if found else len(run)
    return f"{run[:at]} ${GPUCLOUD_RESUME_ARGS}{run[at:]}"


def _in_shell(run: str, args: tuple[str, ...], fault: Report) -> Iterator[Fault]:
    key = ("checkpoint", "resume_args")
    if not _IN_LINE.search(run):
        told = fault(key, f"a shell reads `run`, which must say ${GPUCLOUD_RESUME_ARGS} where they belong")
        misspelt = difflib.get_close_matches(GPUCLOUD_RESUME_ARGS, _VARIABLE.findall(run), n=1)
        near = f"${GPUCLOUD_RESUME_ARGS} in place of ${misspelt[0]}" if misspelt else f"run: {_with_words(run.strip())}"
        yield replace(told, hint=None if "\n" in near else near)
    elif _QUOTED_IN_LINE.search(run):
        yield fault(("run",), f"${GPUCLOUD_RESUME_ARGS} is several words, or none: it stands there without quotes")
    for word in args:
        if re.search(r"[\s*?\[]", word) or not word:
            yield fault(key, f"{quoted(word)} is no word that a shell would leave as it is")
            return


def _model(root: Mapping[str, Any], fault: Report) -> Iterator[Fault]:
    section = root.get("model")
    if not isinstance(section, dict) or section.get("seq") is not None:
        return
    for key in ("batch", "hidden", "layers", "vocab", "recompute"):
        if section.get(key) is not None:
            yield fault(("model", key, KEY), "is of activations, which are counted when `seq` is named")


def _policy(root: Mapping[str, Any], fault: Report) -> Iterator[Fault]:
    if root.get("policy") is None:
        return
    resources = root.get("resources")
    market = resources.get("market") if isinstance(resources, dict) else None
    if root.get("deadline") is None:
        yield fault(("policy", KEY), "is how a `deadline` is kept, and there is none")
    elif root.get("cloud") in [cloud.value for cloud in Cloud if cloud.traits.owned]:
        yield fault(("policy", KEY), "chooses between markets, and your own hosts are in none")
    elif market in ("spot", "on_demand"):
        yield fault(("policy", KEY), f"chooses between markets, and `market: {market}` leaves one: auto")


def _data_here(root: Mapping[str, Any], folder: Path, fault: Report) -> Iterator[Fault]:
    data = root.get("data")
    for source in data if isinstance(data, dict) else ():
        if "://" not in source and not os.path.exists(beside(folder, source)):  # noqa: PTH110  never raises
            yield fault(("data", source, KEY), f"there is no file or folder {quoted(source)} beside the job file")


def _data(root: Mapping[str, Any], fault: Report) -> Iterator[Fault]:
    data = root.get("data")
    if not isinstance(data, dict):
        return
    targets: dict[str, str] = {}
    for source, target in data.items():
        if isinstance(target, str) and target.rstrip("/") in targets:
            first = targets[target.rstrip("/")]
            yield fault(("data", source), f"{quoted(target)} is taken by {quoted(first)}")
        elif isinstance(target, str):
            targets[target.rstrip("/")] = source
    for target, source in targets.items():
        above = next((other for other in targets if target.startswith(f"{other}/")), None)
        if above is not None:  # what is staged is never changed, not even by another set
            yield fault(("data", source), f"{quoted(target)} lies inside {quoted(above)}, which is another set's")


def _metrics(root: Mapping[str, Any], fault: Report) -> Iterator[Fault]:
    metrics = root.get("metrics")
    if isinstance(metrics, dict) and len(metrics) > MOST_PATTERNS:
        yield fault(("metrics", KEY), f"are {len(metrics)} patterns: there may be {MOST_PATTERNS}")


def _secrets(root: Mapping[str, Any], fault: Report) -> Iterator[Fault]:
    env, secrets = root.get("env"), root.get("secrets")
    for at, name in enumerate(secrets if isinstance(secrets, list) else [secrets]):
        if isinstance(env, dict) and isinstance(name, str) and name in env:
            yield fault(("secrets", at), f"{quoted(name)} is in env too: keep it in one of them")


def _launcher(root: Mapping[str, Any], fault: Report) -> Iterator[Fault]:
    run = root.get("run")
    if root.get("launcher") == "torchrun" and isinstance(run, str) and run.strip() and script_of(run) is None:
        yield fault(("launcher",), "torchrun starts a Python script, and `run` is a command line: plain or mpi")


def _image(root: Mapping[str, Any], fault: Report) -> Iterator[Fault]:
    """An image holds the job's whole software: what else would make it has no place beside it."""
    container, secrets = root.get("container"), root.get("secrets")
    if root.get("image") is not None:
        for key in ("conda", "setup"):
            if root.get(key) is not None:
                yield fault((key,), "cannot be with `image`: put it into the image, where every node finds it")
    login = container.get("login") if isinstance(container, dict) else None
    names = secrets if isinstance(secrets, list) else [secrets]
    if isinstance(login, str) and login not in names:
        yield fault(("container", "login"), f"{quoted(login)} is not in `secrets`: add it there")


def _hosts(root: Mapping[str, Any], fault: Report) -> Iterator[Fault]:
    """In the section of each cloud whose machines its user has already."""
    for cloud in Cloud:
        if cloud.traits.owned and cloud.traits.section is not None:
            yield from _hosts_of(cloud, cloud.traits.section, root, fault)


def _keys_here(root: Mapping[str, Any], folder: Path, fault: Report) -> Iterator[Fault]:
    for cloud in Cloud:
        name = cloud.traits.section
        section = (
            root.get(name) if cloud.traits.owned and name is not None and root.get("cloud") == cloud.value else None
        )
        key = section.get("key") if isinstance(section, dict) else None
        if name is not None and isinstance(key, str) and not os.path.isfile(beside(folder, key)):  # noqa: PTH113
            yield fault((name, "key"), f"there is no file {quoted(key)}")


def _hosts_of(cloud: Cloud, name: str, root: Mapping[str, Any], fault: Report) -> Iterator[Fault]:
    section, resources = root.get(name), root.get("resources")
    section = section if isinstance(section, dict) else {}
    hosts = section.get("hosts", [])
    hosts = hosts if isinstance(hosts, list) else [hosts]
    if root.get("cloud") == cloud.value:
        nodes = _most_nodes(resources)
        if not hosts:
            yield fault(("cloud",), f"needs hosts: {name}: {{hosts: [user@address]}}")
        elif nodes > len(hosts):
            yield fault(("resources", "nodes"), f"{nodes} nodes need as many hosts; there are {len(hosts)}")
    yield from _shared_hosts(name, hosts, fault)


def _most_nodes(resources: object) -> int:
    """Return how many nodes there are to be at the most; 1 where that cannot be read."""
    try:
        nodes = values.nodes(resources.get("nodes", 1)) if isinstance(resources, dict) else 1
    except ValueError:
        return 1
    return nodes.most if isinstance(nodes, values.NodeRange) else nodes


def _shared_hosts(section: str, hosts: list[Any], fault: Report) -> Iterator[Fault]:
    """Two entries may be one machine only if each has GPUs of its own."""
    seen: dict[tuple[str, int], list[set[int]]] = {}
    for at, written in enumerate(hosts):
        found = host_of(written)
        if found is None:
            continue
        address, port, gpus = found
        for others in seen.get((address, port), []):
            if not gpus or not others or gpus & others:
                yield fault((section, "hosts", at), f"{quoted(address)} is there twice: give each its own `gpus`")
                break
        seen.setdefault((address, port), []).append(gpus)


def host_of(written: object) -> tuple[str, int, set[int]] | None:
    """Return the address, port and GPUs of a host as it is written; None where that cannot be read."""
    try:
        keys = values.host(written)
    except ValueError:
        return None
    if not isinstance(keys, dict) or not isinstance(keys.get("address"), str):
        return None
    gpus, port = keys.get("gpus", []), keys.get("port", 22)
    gpus = gpus if isinstance(gpus, list) else [gpus]
    numbers = {gpu for gpu in gpus if type(gpu) is int}
    return (keys["address"], port, numbers) if type(port) is int and len(numbers) == len(gpus) else None


def _is_folder(path: Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112  answers False for every name that no folder can have
