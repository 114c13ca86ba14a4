"""`docs`: the handbook in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import ClassVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Markdown
from rich.text import Text
from rich.theme import Theme

from gpucloud.cli.render.words import say, say_json, say_words, width_of
from gpucloud.wiring import find_page, handbook

_WIDEST = 120  # the pages' own lines: help and tables are whole in them
_PLAIN = Theme({"markdown.code": "bold", "markdown.code_block": "cyan"})  # no background: light terminals and dark ones


def docs(words: Sequence[str], *, as_json: bool) -> int:
    """Write the page or section that the words name, the list of pages without words; return the exit code."""
    known = handbook()
    if words:
        return _show(" ".join(words), as_json=as_json)
    if as_json:
        say_json({"pages": [{"name": page.name, "answers": page.answers} for page in known]})
        return 0
    width = max(len(page.name) for page in known)
    say_words("\n".join(f"{page.name:{width}}  {page.answers}" for page in known))
    return 0


def _show(topic: str, *, as_json: bool) -> int:
    found = find_page(handbook(), topic)
    columns = width_of(sys.stdout)
    if as_json:
        say_json({"name": found.name, "section": found.section, "answers": found.answers, "text": found.text})
    elif columns is None:
        say(found.text.rstrip("\n"))
    else:
        console = Console(file=sys.stdout, width=min(columns, _WIDEST), theme=_PLAIN)
        console.print(_Handbook(found.text), crop=False)
    return 0


class _AsWritten(CodeBlock):
    """A fenced block without padding and breaks of its own: what is copied from it stays right."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(str(self.text).rstrip(), style=self.style_name, no_wrap=True, overflow="ignore")


class _Handbook(Markdown):
    """Markdown with such blocks."""

    elements: ClassVar = {**Markdown.elements, "fence": _AsWritten}
