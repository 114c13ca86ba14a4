"""How known programs lay out their checkpoints: a listing in, sets of files out; and what a watcher is told. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeVar

from gpucloud.domain.checkpoint.directory import FileSet, Listing, above, below, family, folder_of, last_number
from gpucloud.domain.checkpoint.manifest import CounterDrop
from gpucloud.domain.job.spec import CHECKPOINT, CheckpointDirectory, Layout, OnNotice

METADATA = ".metadata"
RANK_STATE = re.compile(r"rng_state_(\d+)\.pth")
_HF = re.compile(r"(?:^|.*/)checkpoint-(\d+)(?=/)")
_DCP_ALONE = re.compile(r"(?:^|.*/)checkpoint-\d+/[^/]*(?:\.distcp|\.metadata)")
_DEEPSPEED = re.compile(r"(?:^|.*/)global_step(\d+)(?=/)")
_LATEST = "latest"  # DeepSpeed writes the newest folder's name into it when that folder is whole
_STATE = "trainer_state.json"
_UNFINISHED = (
    "checkpoint-is-incomplete.txt"  # while it saves because of SIGTERM (transformers 5, enable_jit_checkpoint)
)
_MEGATRON = re.compile(r"(?:^|.*/)iter_(\d{7})(?=/)")
_TRACKER = "latest_checkpointed_iteration.txt"  # Megatron-LM's, written when every rank has written
TORCH_FILES = (".pt", ".pth", ".pth.tar", ".ckpt")
"""How the names of files end that `torch.save` wrote."""
SINGLE_FILES = (*TORCH_FILES, ".safetensors")
_BEST = re.compile(r"(?:^|[^a-z])best(?![a-z])", re.IGNORECASE)
_WHOLE = re.compile(r"(?:^|[^a-z])(?:best|last|latest|final)(?![a-z])", re.IGNORECASE)
"""What names call a copy that needs no other file: YOLO's last.pt and best.pt, detectron2's model_final.pth."""
_USUAL = re.compile(r"best|latest|last|final|epoch|step|iter|model|checkpoint|ckpt|snapshot|weights|[^a-z]+")
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.")
_STEP = re.compile(r"step[=_-]?(\d+)")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The sets of a directory; `unclear` says why files that look like checkpoints are none, in one line."""

    sets: tuple[FileSet, ...] = ()
    unclear: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What the job file says of its directory; `ranks` are the node's own, `nodes` how many write at all.

    With `per_node` each node's own files belong to a checkpoint, and `node` is this one's number; else node 0's alone.
    """

    layout: Layout = Layout.AUTO
    done_file: str | None = None
    ranks: int = 1
    nodes: int = 1
    per_node: bool = False
    node: int = 0

    @property
    def own_ranks(self) -> range:
        """The numbers of the node's own ranks among all."""
        return range(self.node * self.ranks, (self.node + 1) * self.ranks)


def find_sets(rule: Rule, listing: Listing) -> Found:
    """Return the checkpoints in the directory, those that are still being written too."""
    if rule.done_file is not None:
        return Found(sets=_with_done_file(rule.done_file, listing))
    layout = rule.layout if rule.layout is not Layout.AUTO else layout_of(listing)
    match layout:
        case Layout.HF:
            return Found(sets=_hf(listing, rule.ranks))
        case Layout.DEEPSPEED:
            return Found(sets=_deepspeed(listing))
        case Layout.DCP:
            return _dcp(listing, apart=rule.nodes > 1 and not rule.per_node)
        case Layout.MEGATRON:
            return _megatron(listing, apart=rule.nodes > 1 and not rule.per_node)
        case Layout.LIGHTNING:
            return Found(sets=_newest_files([path for path in listing if path.endswith(".ckpt")], listing))
        case Layout.FILE:
            return _files(listing, explicit=rule.layout is Layout.FILE)
        case Layout.AUTO:
            return Found()


def layout_of(listing: Listing) -> Layout:
    """Return the layout that a directory has; AUTO while it has none that is known."""
    tests: tuple[tuple[Layout, Callable[[str], object]], ...] = (
        (Layout.DCP, _DCP_ALONE.fullmatch),  # Trainer's are deeper
        (Layout.HF, _HF.match),
        (Layout.DEEPSPEED, _DEEPSPEED.match),
        (Layout.MEGATRON, _MEGATRON.match),  # its newer formats are of torch.distributed.checkpoint's files
        (Layout.DCP, lambda path: path.endswith(".distcp") or path.rpartition("/")[2] == METADATA),
        (Layout.LIGHTNING, lambda path: path.endswith(".ckpt")),
        (Layout.FILE, lambda path: "/" not in path and path.endswith(SINGLE_FILES)),
    )
    return next((layout for layout, holds in tests if any(holds(path) for path in listing)), Layout.AUTO)


def checkpoints_of(sets: Iterable[FileSet], listing: Listing) -> dict[str, tuple[str, ...]]:
    """Return what is a checkpoint by itself: the whole folders, and each other file that is named as one is.

    Such files are one by the folder too in which they lie, if that is numbered: Megatron-LM's `iter_0000500/`.
    """
    names = {one.name for one in sets if one.name}
    single = sorted(path for path in listing if path.endswith(SINGLE_FILES) and names.isdisjoint(above(path)))
    found: dict[str, tuple[str, ...]] = {}
    for path in single:
        for top in above(path):
            if last_number(top) is not None:
                found[top] = (*found.get(top, ()), path)
    return (
        found | {path: (path,) for path in single} | {one.name: one.paths for one in sets if one.complete and one.name}
    )


def newest_checkpoint(rule: Rule, listing: Listing) -> str:
    """Return the path of the checkpoint that was written last, a folder's or a file's; "" for the directory itself.

    Of single files it is none that calls itself the best, if there is another: copies of that are often newer.
    """
    sets = find_sets(rule, listing).sets
    newest = max(sets, key=lambda one: (one.written_ns(listing), one.step or 0), default=None)
    if newest is not None and (newest.name or newest.marked):
        return newest.name
    paths = newest.paths if newest is not None else tuple(listing)
    others = [path for path in paths if not _BEST.search(_name(path))] or paths
    return max(others, key=lambda path: (listing[path].mtime_ns, last_number(path) or 0, path), default="")


def leftovers(rule: Rule, listing: Listing, restored: Iterable[str]) -> tuple[str, ...]:
    """Return the paths of what an earlier attempt left in the directory and a script might take for its newest.

    That is every checkpoint there, and what is named like one that is put back, however far it got; save those that
    are older by their number than what is put back.
    """
    kept = tuple(restored)
    # By folder or file name beside each other: `step_600/` beside `step_500/` that is put back.
    there: dict[tuple[str, str], int | None] = {}
    for top in _tops(kept):
        kind, number = (folder_of(top), family(_name(top))), last_number(top)
        there[kind] = max(filter(None, (there.get(kind), number)), default=number)
    found = {path for one in find_sets(rule, listing).sets for path in below_or_self(one, listing)}
    if rule.done_file is None or not kept:
        found |= {path for path in listing if _could_be(rule, path, listing)}
    for top in _tops(listing):
        if (folder_of(top), family(top.rpartition("/")[2])) in there:
            found |= {path for path in listing if path == top or path.startswith(f"{top}/")}
    return tuple(sorted(path for path in found if path not in kept and not _is_older(path, there)))


def below_or_self(one: FileSet, listing: Listing) -> tuple[str, ...]:
    """Return the paths of a set, with what else lies in its folder."""
    return one.paths if not one.name or one.name in listing else (*below(one.name, listing),)


def is_last(marker: str, paths: Iterable[str], listing: Listing) -> bool:
    """Whether nothing was written after the marker: in a folder that is written again, an old one says nothing."""
    return all(listing[path].mtime_ns <= listing[marker].mtime_ns for path in paths)


def _could_be(rule: Rule, path: str, listing: Listing) -> bool:
    if rule.done_file is not None:
        return path.endswith(SINGLE_FILES) or any(last_number(top) is not None for top in above(path))
    layout = rule.layout if rule.layout is not Layout.AUTO else layout_of(listing)
    return layout in (Layout.LIGHTNING, Layout.FILE) and path.endswith(SINGLE_FILES)


def _tops(paths: Iterable[str]) -> set[str]:
    """Return every folder and file on the way to the paths."""
    return {top for path in paths for top in (*above(path), path)}


def _is_older(path: str, there: dict[tuple[str, str], int | None]) -> bool:
    for top in _tops((path,)):
        number, own = there.get((folder_of(top), family(top.rpartition("/")[2]))), last_number(top)
        if number is not None and own is not None and own < number:
            return True
    return False


def _hf(listing: Listing, ranks: int) -> tuple[FileSet, ...]:
    """Hugging Face's Trainer writes trainer_state.json last, save the other ranks' random states."""
    sets = []
    for folder, step in _folders(_HF, listing):
        paths = below(folder, listing)
        states = {int(m[1]) for path in paths if (m := RANK_STATE.fullmatch(path[len(folder) + 1 :]))}
        whole = f"{folder}/{_STATE}" in listing and f"{folder}/{_UNFINISHED}" not in listing
        complete = whole and (not states or set(range(ranks)) <= states)
        sets.append(FileSet(name=folder, step=step, paths=paths, complete=complete, marked=True))
    return tuple(sets)


def _deepspeed(listing: Listing) -> tuple[FileSet, ...]:
    """DeepSpeed names the newest folder in `latest` beside it, after every rank has written."""
    sets = []
    for folder, step in _folders(_DEEPSPEED, listing):
        latest = f"{folder_of(folder)}/{_LATEST}".lstrip("/")
        paths = below(folder, listing)
        complete = latest in listing and is_last(latest, paths, listing)
        with_latest = tuple(sorted((*paths, latest))) if complete else paths
        sets.append(FileSet(name=folder, step=step, paths=with_latest, complete=complete, marked=True))
    return tuple(sets)


def _megatron(listing: Listing, *, apart: bool) -> Found:
    """Megatron-LM names the newest folder's step in a file beside it, after every rank has written."""
    if apart and any(path.endswith(".distcp") for path in listing):
        return _APART
    sets = []
    for folder, step in _folders(_MEGATRON, listing):
        tracker = f"{folder_of(folder)}/{_TRACKER}".lstrip("/")
        paths = below(folder, listing)
        complete = tracker in listing and is_last(tracker, paths, listing)
        sets.append(FileSet(name=folder, step=step, paths=paths, complete=complete, marked=True))
    return Found(sets=tuple(sets))


_APART = Found(
    unclear="each node writes its own part of a torch.distributed.checkpoint, and only node 0's is kept: "
    "checkpoint: {per_node: true} keeps them all"
)


def _dcp(listing: Listing, *, apart: bool) -> Found:
    """torch.distributed.checkpoint renames `.metadata` into its place when every rank has written."""
    folders = {folder_of(path) for path in listing if path.endswith(".distcp") or _name(path) == METADATA}
    if apart and folders:
        return _APART
    sets = []
    for folder in sorted(folders):
        paths, marker = below(folder, listing), f"{folder}/{METADATA}".lstrip("/")
        data = [path for path in paths if path.endswith(".distcp")]
        # Lightning's own part of a sharded checkpoint comes after torch's.
        whole = not folder.endswith(".ckpt") or f"{folder}/meta.pt" in listing
        complete = marker in listing and bool(data) and whole and is_last(marker, data, listing)
        step = last_number(_name(folder))
        sets.append(FileSet(name=folder, step=step, paths=paths, complete=complete, marked=True))
    return Found(sets=tuple(sets))


def _with_done_file(name: str, listing: Listing) -> tuple[FileSet, ...]:
    sets = []
    for folder in sorted({folder_of(path) for path in listing if _name(path) == name}):
        paths, marker = below(folder, listing), f"{folder}/{name}".lstrip("/")
        complete = is_last(marker, paths, listing)
        sets.append(FileSet(name=folder, step=last_number(_name(folder)), paths=paths, complete=complete, marked=True))
    return tuple(sets)


def _files(listing: Listing, *, explicit: bool) -> Found:
    found = [path for path in listing if path.endswith(SINGLE_FILES) and (explicit or "/" not in path)]
    parts = _parts(found)
    if any(_SHARD.search(path) for path in found):
        return Found(unclear=f"{found[0]} is one of several files that belong together: {SAY_DONE_FILE}")
    if not explicit and len(parts) > 1:
        one, other = parts[:2]
        return Found(
            unclear=f"do {one} and {other} belong together? If each is a whole checkpoint: checkpoint: {{layout: "
            f"file}}; else {SAY_DONE_FILE}"
        )
    return Found(sets=_newest_files(found, listing))


def _parts(paths: list[str]) -> list[str]:
    """Return one path of each kind that may be a part of something: `model.pt` and `optimizer.pt`, G_last and D_last.

    What calls itself the last, the final or the best one is a copy, if the rest of its name is a usual one.
    """
    kinds = {family(path): path for path in paths if not _WHOLE.search(_name(path))}
    stems = {_USUAL.sub("", _name(path).lower().partition(".")[0]): path for path in paths}
    apart = {stem: path for stem, path in stems.items() if stem}
    return sorted(kinds.values() if len(kinds) >= len(apart) else apart.values())


SAY_DONE_FILE = "have the script write a file when a folder is whole, and name it: checkpoint: {done_file: NAME}"


def _newest_files(paths: list[str], listing: Listing) -> tuple[FileSet, ...]:
    """Return one set of the newest file of each family: `last.ckpt` and the newest of `epoch=…-step=….ckpt`."""
    newest: dict[str, str] = {}
    for path in sorted(paths, key=lambda path: (listing[path].mtime_ns, path)):
        newest[family(path)] = path
    if not newest:
        return ()
    chosen = tuple(sorted(newest.values()))
    steps = [step for path in chosen if (step := _step_of_file(_name(path))) is not None]
    return (FileSet(name="", step=max(steps, default=None), paths=chosen, complete=True, marked=False),)


def _step_of_file(name: str) -> int | None:
    m = _STEP.search(name)
    return int(m[1]) if m else last_number(name)


def _folders(pattern: re.Pattern[str], listing: Listing) -> list[tuple[str, int]]:
    found = {m[0]: int(m[1]) for path in listing if (m := pattern.match(path))}
    return sorted(found.items(), key=lambda item: (item[1], item[0]))


def _name(path: str) -> str:
    return path.rpartition("/")[2]


# What the watcher of a script's directory is told.


@dataclass(frozen=True, slots=True, kw_only=True)
class Additions:
    """What a launch gets beside where a checkpoint was put back: words behind its own, and variables."""

    words: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()

    def after(self, checkpoint: str) -> Additions:
        """Return them with the path of the checkpoint that was put back, where they ask for it."""
        words = tuple(word.replace(CHECKPOINT, checkpoint) for word in self.words)
        variables = tuple((name, value.replace(CHECKPOINT, checkpoint)) for name, value in self.variables)
        return Additions(words=words, variables=variables)

    def __str__(self) -> str:
        words = (*self.words, *(f"{name}={value}" for name, value in self.variables))
        return " ".join(word if word.split() == [word] else shlex.quote(word) for word in words)


_EPOCHS = ("epoch", "EPOCHS_RUN", "epochs_run", "current_epoch")
_STEPS = ("iter_num", "global_step", "step", "iteration", "iter", "current_step", "current_iter")
COUNTERS = (*_EPOCHS, *_STEPS)
"""The keys under which scripts save how far they are: nanoGPT's, Lightning's, timm's, PyTorch's examples'."""

COUNTER_HOLDERS = ("trainer", "trainer_state", "train_state", "training_state", "progress", "meta")
"""The keys of dicts in which scripts have them that have none beside their weights."""

Counters = Mapping[str, int]


def step_drop(saved: int, put_back: int) -> CounterDrop | None:
    """Return by what the step of a first save is behind that of the checkpoint that was put back; None unless it is."""
    return CounterDrop(saved=saved, put_back=put_back) if saved < put_back else None


def counter_drop(saved: Mapping[str, Counters], put_back: Mapping[str, Counters]) -> CounterDrop | None:
    """Return by what the files of a first save are behind those that were put back; None unless they clearly are.

    Each file is compared with that of its family. An epoch decides before a step, which may be counted within it; and
    one file that got further shows that the script went on: others, the best model's, are written now and then.
    """
    before = {family(path): counters for path, counters in put_back.items()}
    found = [_moved(counters, before.get(family(path), {})) for path, counters in saved.items()]
    behind = [one for one in found if one is not None and one.saved < one.put_back]
    ahead = any(one is not None and one.saved > one.put_back for one in found)
    return behind[0] if behind and not ahead else None


def _moved(saved: Counters, put_back: Counters) -> CounterDrop | None:
    """Return how the first counter of both moved; scripts count steps within an epoch, and may begin it again."""
    key = next((key for key in COUNTERS if key in saved and key in put_back), None)
    if key is None:
        return None
    return CounterDrop(saved=saved[key], put_back=put_back[key], epochs=key in _EPOCHS)


def anew_warning(found: CounterDrop, additions: Additions) -> str:
    """Return the warning that a script began at 0 though a checkpoint was put back, and what its first save shows."""
    of = "epoch" if found.epochs else "step"
    put_back = f"the checkpoint of {of} {found.put_back} was put back"
    return f"the script began anew: it saved {of} {found.saved} after {put_back}; {resume_advice(additions)}"


def resume_advice(additions: Additions) -> str:
    """Return what helps a script to go on that began anew, or what did not."""
    if additions != Additions():
        return f"{additions} did not have it resume"
    return "tell it to resume by `checkpoint: {resume_args: …}`"


def additions_of(directory: CheckpointDirectory | None) -> Additions:
    """Return what the job file has a script told where a checkpoint was put back."""
    if directory is None:
        return Additions()
    return Additions(words=directory.resume_args, variables=directory.resume_variables)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepOrder:
    """One member's directory, and where its checkpoints go: `prefix` in `store`, `keep` of them.

    Every member puts the newest back; that of `rank` 0 alone is kept. `code`, `directory` and the attempt's `folder`
    are absolute paths; `first_rank` is the first of the member's own ranks among all. A script that is asked to stop
    has `save` for that, and its supervisor then waits for as long as `upload` for what it saved to reach the store.
    `outputs` come home from this machine, as they are named from `code` on. `brings`: its supervisor fetches some, in
    what is left of a notice too.
    """

    code: str
    directory: str
    rule: Rule
    on_notice: OnNotice
    settle: timedelta
    store: str
    prefix: str
    attempt: int
    keep: int
    rank: int
    folder: str
    first_rank: int
    additions: Additions = Additions()
    save: timedelta = timedelta(seconds=60)
    upload: timedelta = timedelta(0)
    outputs: tuple[str, ...] = ()
    brings: bool = False

    def leaving(self, now: datetime, at: datetime, uploads: timedelta, *, alone: bool) -> Leaving:
        """Return what the script has when the node is told at `now` to be done by `at`; a time that is past has no end.

        What the longest copy and upload of its saves took, and half as much, is left for the last one, but half of the
        time at the most: without a save there is nothing to upload. With `alone` this node uploads nothing.
        """
        lasts = at > now
        end = at if lasts else now + self.save + self.upload
        if alone:
            end = min(end, now + self.save)
        left = end - now - _MARGIN
        if not lasts or alone:
            return Leaving(script=now + min(self.save, left), upload=end - _MARGIN, is_short=False)
        wanted = max(_LEAST_UPLOAD, 1.5 * uploads)
        script = max(left - wanted, left / 2)
        return Leaving(script=now + script, upload=end - _MARGIN, is_short=wanted > left / 2)


_MARGIN = timedelta(seconds=1)  # to tell the supervisor, and to end
_LEAST_UPLOAD = timedelta(seconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """Until when a script may save, and what it saved may be uploaded; `is_short` where an upload may take longer."""

    script: datetime
    upload: datetime
    is_short: bool
