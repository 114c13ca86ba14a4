"""The handbook: the pages that travel with the package in `gpucloud/docs/`, and the one that a topic means."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import gpucloud
from gpucloud.domain.errors import GpucloudError, UsageError

IN_ORDER = (
    "getting-started.md",
    "job-file.md",
    "commands.md",
    "scripts-and-checkpoints.md",
    "money.md",
    "markets-and-deadlines.md",
    "aws.md",
    "own-machines.md",
    "operations-and-security.md",
    "benchmarks.md",
    "proofs.md",
)
"""The pages' files as they are best read."""

IN_CHINESE = ("zh/README.md", "zh/getting-started.md")
"""Translations, called `zh` and `zh-getting-started`: they are found by their whole names, or by any Chinese word."""

_CHINESE = re.compile("[\u4e00-\u9fff]")
_FENCED_OR_TITLE = re.compile(r"^```.*?^```$|^(#{2,4}) ([^\n]+)$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page of the handbook, or one section of it."""

    name: str
    """The file's name without its ending."""
    section: str | None
    """The heading of the section; None for the whole page."""
    answers: str
    """What the page answers, in one sentence."""
    text: str
    """Markdown, from the heading to the end of the page or section."""


def pages() -> tuple[Page, ...]:
    """Return the whole pages in the order in which they are best read; GpucloudError when one is missing."""
    return _read(IN_ORDER)


def translations() -> tuple[Page, ...]:
    """Return the pages in other languages; GpucloudError when one is missing."""
    return _read(IN_CHINESE)


def _read(files: Sequence[str]) -> tuple[Page, ...]:
    folder = Path(gpucloud.__file__).resolve().parent / "docs"
    try:
        return tuple(page(_name(file), (folder / file).read_text(encoding="utf-8")) for file in files)
    except FileNotFoundError as error:
        raise GpucloudError(
            f"this installation of gpucloud lacks docs/{Path(error.filename).name}",
            hint="install gpucloud anew, from a wheel or a whole checkout",
        ) from error


def _name(file: str) -> str:
    return file.removesuffix(".md").removesuffix("/README").replace("/", "-")


def page(name: str, text: str) -> Page:
    """Return a page of that text: a title, then the sentence that says what it answers."""
    answers = " ".join(text.split("\n\n")[1].split())
    return Page(name=name, section=None, answers=answers, text=text)


def find(known: Sequence[Page], topic: str) -> Page:
    """Return the page or section that a topic means; UsageError, with the nearest, for one that means none or several.

    A whole name counts before a part of one, and then a page before a section. A part is the beginning of a page's
    name, of a word in it, or of a heading. A translation is meant by its own name alone.
    """
    wanted = "zh" if _CHINESE.search(topic) else _slug(topic) or "-"
    plain = [one for one in known if one.name.partition("-")[0] != "zh"]
    sections = [section for one in plain for section in _sections(one)]
    for meant in (
        [one for one in known if one.name == wanted],
        [one for one in sections if _called(one) == wanted],
        [one for one in plain if f"-{one.name}".find(f"-{wanted}") >= 0],
        [one for one in sections if _called(one).startswith(wanted)],
        [one for one in known if one.name.startswith(wanted)],
    ):
        if len(meant) == 1:
            return meant[0]
        if meant:
            raise UsageError(f"{topic!r} may mean several pages", hint=_ways(meant))
    names = [name for one in known for name in (one.name, *one.name.split("-"))]
    near = get_close_matches(wanted, [*names, *(_called(one) for one in sections)], n=1)
    hint = f"did you mean gpucloud docs {near[0]}?" if near else "gpucloud docs lists the pages"
    raise UsageError(f"the handbook has no page {topic!r}", hint=hint)


def _sections(whole: Page) -> Iterator[Page]:
    """Yield the sections of a page; what stands in a fenced block is no heading."""
    section_titles = [found for found in _FENCED_OR_TITLE.finditer(whole.text) if found[1]]
    for number, section_title in enumerate(section_titles):
        after = [other.start() for other in section_titles[number + 1 :] if len(other[1]) <= len(section_title[1])]
        text = whole.text[section_title.start() : after[0] if after else None].rstrip() + "\n"
        yield Page(name=whole.name, section=section_title[2], answers=whole.answers, text=text)


def _called(one: Page) -> str:
    return one.name if one.section is None else _slug(one.section)


def _slug(words: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def _ways(meant: Sequence[Page]) -> str:
    names = dict.fromkeys(_called(one) for one in meant)
    several = names if len(names) > 1 else dict.fromkeys(one.name for one in meant)
    return " · ".join(f"gpucloud docs {name}" for name in several)
