"""Commands for apt and dpkg, and where packages come from."""

from __future__ import annotations

import re

from gpucloud.domain.machine.decisions import Ask, MachineStep, Run
from gpucloud.domain.machine.facts import MachineFacts, Source

# Ubuntu's archive by any of its names: archive., security., ports., and those of regions and clouds before them.
_ARCHIVE = re.compile(r"https?://(?:[\w-]+\.)*(?:archive|security|ports)\.ubuntu\.com/ubuntu(?:-ports)?/?(?=\s|$)")
# needrestart would restart services while the machine is being made; a lock is waited for, never broken.
_APT = (
    "env", "DEBIAN_FRONTEND=noninteractive", "NEEDRESTART_MODE=a", "apt-get", "-q", "-y",
    "-o", "DPkg::Lock::Timeout=600", "-o", "Acquire::Retries=3",
    # dpkg asks by itself about a configuration file that its owner changed, and ends where nobody can answer.
    "-o", "Dpkg::Options::=--force-confdef", "-o", "Dpkg::Options::=--force-confold",
)  # fmt: skip
_CONFIGURE = (
    "env",
    "DEBIAN_FRONTEND=noninteractive",
    "dpkg",
    "--force-confdef",
    "--force-confold",
    "--configure",
    "-a",
)
_WRITE = 'umask 022; cat >"$1.new" && mv -f "$1.new" "$1"'


def install(*packages: str, replacing: bool = False) -> Run:
    """Return the command that installs the packages; `replacing`: held ones and newer ones give way to them."""
    change = ("--allow-change-held-packages", "--allow-downgrades") if replacing else ()
    return Run(argv=(*_APT, "install", "--no-install-recommends", *change, *packages))


def simulate(packages: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command that says what installing them would do; it changes nothing and needs no right."""
    change = ("--allow-change-held-packages", "--allow-downgrades")
    return ("apt-get", "-s", "-y", "install", "--no-install-recommends", *change, *packages)


def simulated(output: str) -> tuple[tuple[str, str], ...]:
    """Return the packages with their versions in the output of `simulate`."""
    return tuple(re.findall(r"^Inst (\S+) (?:\[\S+\] )?\((\S+)", output, flags=re.MULTILINE))


def hold(*packages: str) -> Run:
    """Return the command after which upgrades leave the packages alone."""
    return Run(argv=("apt-mark", "hold", *packages))


def write(path: str, text: str) -> Run:
    """Return the command that puts a file in its place, whole."""
    return Run(argv=("sh", "-c", _WRITE, "sh", path), text=text)


def before_apt(facts: MachineFacts, mirror: str | None) -> MachineStep | None:
    """Return what must be done before apt can be asked: repair, the mirror, fresh lists; None when nothing."""
    if (repair := repaired(facts)) is not None:
        return repair
    moved = tuple(source for source in facts.sources if _mirrored(source, mirror) != source.text)
    if moved:
        return MachineStep(
            name="mirror",
            why=f"packages come from {mirror}",
            commands=tuple(write(source.path, _mirrored(source, mirror)) for source in moved),
        )
    if facts.listed != facts.sources_digest:
        return MachineStep(
            name="lists",
            why="apt's lists are older than a day or than its sources",
            commands=(Run(argv=(*_APT, "update")),),
            lists=True,
        )
    return None


def repaired(facts: MachineFacts) -> MachineStep | None:
    """Return the step after a kill in the middle of an installation; None when dpkg has nothing half-way."""
    broken = [p.name for p in facts.packages if p.state not in ("installed", "config-files", "not-installed")]
    if facts.dpkg_interrupted or broken:
        why = f"dpkg was interrupted{': ' + ', '.join(broken) if broken else ''}"
        # A package that dpkg cannot configure alone, apt may: what it depends on did not arrive.
        configure = Run(argv=_CONFIGURE, passes=(0, 1))
        return MachineStep(name="dpkg", why=why, commands=(configure, Run(argv=(*_APT, "-f", "install"))))
    return None


def unasked(facts: MachineFacts, sets: tuple[tuple[str, ...], ...]) -> Ask | None:
    """Return the question that is still open about these sets."""
    open_ = tuple(packages for packages in sets if facts.answer(packages) is None)
    return Ask(sets=open_) if open_ else None


def _mirrored(source: Source, mirror: str | None) -> str:
    return _ARCHIVE.sub(mirror, source.text) if mirror else source.text
