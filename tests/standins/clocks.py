"""A Python whose clock is wrong: every process that it runs has the time of day shifted, as on a host without NTP.

No kernel shifts the time of day for some of its processes: a time namespace has the clocks since boot only. So it is
done where the clocks enter Python, before anything of ours is imported. What is not shifted: the times of files, and
what programs other than Python say.
"""

from __future__ import annotations

import sys
import sysconfig
import venv
from pathlib import Path

_SHIFT = '''
"""Shifts the time of day."""
import datetime as _datetime
import time as _time

AHEAD_S = {ahead_s!r}
_real, _time_ns, _gettime = _datetime.datetime, _time.time_ns, _time.clock_gettime
_localtime, _gmtime, _strftime = _time.localtime, _time.gmtime, _time.strftime


class _Any(type):
    def __instancecheck__(cls, one):
        return isinstance(one, _real)


class datetime(_real, metaclass=_Any):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(_time.time(), tz)

    @classmethod
    def utcnow(cls):
        return cls.now(_datetime.timezone.utc).replace(tzinfo=None)


_time.time_ns = lambda: _time_ns() + int(AHEAD_S * 1e9)
_time.time = lambda: _time.time_ns() / 1e9
_time.clock_gettime = lambda clock: _gettime(clock) + (AHEAD_S if clock == _time.CLOCK_REALTIME else 0)
_time.localtime = lambda seconds=None: _localtime(_time.time() if seconds is None else seconds)
_time.gmtime = lambda seconds=None: _gmtime(_time.time() if seconds is None else seconds)
_time.strftime = lambda form, at=None: _strftime(form, _time.localtime() if at is None else at)
_datetime.datetime = datetime
'''


def python_with_clock(folder: Path, *, ahead_s: float) -> Path:
    """Make an interpreter like this one, its packages included, and return its path."""
    venv.create(folder, symlinks=True, with_pip=False)
    paths = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv", vars=paths))
    site.joinpath("shifted_clock.py").write_text(_SHIFT.format(ahead_s=ahead_s))
    packages = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    site.joinpath("a_clock.pth").write_text("\n".join(["import shifted_clock", *sorted(packages)]) + "\n")
    return folder / "bin" / Path(sys.executable).name
