"""`docs`: the handbook in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markdown import Markdown
from rich.theme import Theme

from gpucloud.cli.render.words import say, say_json, say_words, width_of
from gpucloud.wiring import find_page, handbook

_WIDEST = 120  # the pages' own lines: help and tables are whole in them
_PLAIN = Theme({"markdown.code": "bold"})  # no background of its own: it reads on light and dark terminals


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
        console.print(Markdown(found.text, code_theme="ansi_dark"))
    return 0
