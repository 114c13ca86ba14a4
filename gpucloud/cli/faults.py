"""An error as the user meets it: one message, one hint, one exit code; our own faults go to a file.

And sums of money on a command line, of which the right form is said.
"""

from __future__ import annotations

import errno
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from decimal import Decimal
from itertools import takewhile
from pathlib import Path
from typing import Any

import typer

from gpucloud.cli.render.words import say_error, tell_error
from gpucloud.domain.errors import BudgetTooSmall, GpucloudError, Interrupted, PlanRefused, StoreError, UsageError
from gpucloud.domain.job.quantities import parse_usd
from gpucloud.wiring import Gpucloud

MISREAD: type[Any] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
"""Whatever typer raises of a line that it cannot read. It is click's, or typer's own copy of it in later versions."""

_OF_A_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_FULL = "`df -h` says which disk is full; `gpucloud down JOB` works on a full one"

_NOWHERE, _ELSEWHERE = "the folder that this was called in is there no more", "cd to another, then the same command"


def exit_code_of(error: BaseException) -> int:
    """Say what went wrong, as JSON too when that was asked for, and return the exit code."""
    misread = error if isinstance(error, MISREAD) else None
    known = known_error(error)
    if misread is not None:
        misread.show()  # with the usage
    elif not isinstance(known, Interrupted):
        tell_error(known)
    if _asked_for_json(sys.argv[1:]):
        say_error(known)
    return known.exit_code


def _asked_for_json(words: Sequence[str]) -> bool:
    """Whether gpucloud was asked for it: what stands behind `--`, or `ssh JOB`, is another command's."""
    own = list(takewhile(lambda word: word != "--", words))
    return "--json" in own and next((word for word in own if not word.startswith("-")), None) != "ssh"


def known_error(error: BaseException) -> GpucloudError:
    """Return the error as one that the user meets; one that nobody foresaw is a fault of ours, and says so."""
    if isinstance(error, typer.Abort):  # of a question that got no answer, or as typer calls an EOFError
        error = error.__cause__ or KeyboardInterrupt()
    if isinstance(error, KeyboardInterrupt):
        return Interrupted()
    if isinstance(error, MISREAD):
        return _of_the_line(error)
    return error if isinstance(error, GpucloudError) else _of_the_system(error) or _ours(error)


def require_here() -> None:
    """Raise UsageError where the folder that this was called in is there no more: nothing is found from it."""
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise UsageError(_NOWHERE, hint=_ELSEWHERE) from error


def _of_the_line(error: Any) -> UsageError:
    """Return what typer says of a line that it cannot read."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "gpucloud"
    return UsageError(error.format_message(), hint=f"{command} --help")


def _of_the_system(error: BaseException) -> GpucloudError | None:
    if isinstance(error, OSError) and error.filename is not None:
        return StoreError(f"{error.filename}: {error.strerror}", hint="check the disk's space and the folder's rights")
    if isinstance(error, FileNotFoundError):  # without a name: the system was asked for this very folder
        return UsageError(_NOWHERE, hint=_ELSEWHERE)
    if isinstance(error, OSError) and error.errno in _OF_A_DISK:  # of a file that was open, which has no name any more
        return StoreError(f"a file could not be written: {error.strerror}", hint=f"free some space: {_FULL}")
    return None


def _ours(error: BaseException) -> GpucloudError:
    path = _write(error) if "--debug" in sys.argv else None
    hint = f"the traceback is in {path}" if path else "`gpucloud --debug …` writes a traceback to a file"
    return GpucloudError(f"a fault of gpucloud itself: {type(error).__name__}: {error}", hint=hint)


def _write(error: BaseException) -> Path | None:
    path = Gpucloud().home.root / "logs" / f"fault-{datetime.now(timezone.utc):%Y%m%dT%H%M%S}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(traceback.format_exception(error)))
    except OSError:
        return None
    return path


# What a line says counts before the job file: so does what is to move.


_KEYS = {key: re.compile(rf"\b{key}: ([0-9.]+(?: USD|[a-z]+(?: [0-9]+[a-z]+)*))") for key in ("budget", "deadline")}


@contextmanager
def moved_on_the_line(*, shared_by: int = 1, **given: object) -> Iterator[None]:
    """Name the option, where it is given, in the hint of a plan that is refused for its number in the file's words.

    Of a budget that so many runs share in equal parts, the hint names what all of them need.
    """
    try:
        yield
    except (PlanRefused, BudgetTooSmall) as refused:
        hint = refused.hint or ""
        if shared_by > 1:
            hint = _KEYS["budget"].sub(lambda told: f"budget: {shared_by * parse_usd(told[1])} USD", hint)
        for key in (key for key, value in given.items() if value is not None):
            hint = _KEYS[key].sub(rf"--{key} '\1'", hint)
        refused.hint = hint or None
        raise


# A sum of money on the command line.


_BARE = re.compile(r"[0-9]+(\.[0-9]+)?")
_NUMBER = re.compile(rf"[^0-9.,-]*({_BARE.pattern})[^0-9.,-]*")  # in another currency, such as "10 EUR"


def sum_of(text: str | None) -> Decimal | None:
    """Return the sum that `--budget` says, None for none. UsageError says the right form."""
    return None if text is None else _sum(text, "--budget '{} USD'")


def meant(words: Sequence[str]) -> tuple[str | None, Decimal | None]:
    """Return the job, None for the file here, and the sum that the words of a command line mean."""
    with suppress(ValueError):
        return None, parse_usd(" ".join(words))
    job, rest = (words[0] if words else None), " ".join(words[1:])
    if job is not None and not rest and _BARE.fullmatch(job):
        return None, _sum(job, f"gpucloud budget {'' if _has_file() else 'JOB '}{{}} USD")
    return job, (_sum(rest, f"gpucloud budget {job} {{}} USD") if rest else None)


def require_job(job: str | None, wanted: Decimal | None) -> None:
    """Raise UsageError, with the whole command, for a sum without a job where there is no job file."""
    if job is None and wanted is not None and not _has_file():
        require_here()
        hint = f"gpucloud budget JOB {wanted:f} USD; gpucloud status lists jobs"
        raise UsageError("no job is named, and there is no gpucloud.yaml here", hint=hint)


def _has_file() -> bool:
    return Path("gpucloud.yaml").is_file()


def _sum(text: str, form: str) -> Decimal:
    """Return the sum; `form` is what is to be typed, but for a number."""
    try:
        return parse_usd(text)
    except ValueError as error:
        hint = form.format(_number_in(text) or "SUM")
        raise UsageError(str(error), hint=f"did you mean {hint}?" if _BARE.fullmatch(text) else hint) from error


def _number_in(text: str) -> str | None:
    """Return the one number of what was typed; None where there is none, or none that may be a sum."""
    found = _NUMBER.fullmatch(text)
    with suppress(ValueError):
        return found[1] if found is not None and parse_usd(f"{found[1]} USD") else None
    return None
