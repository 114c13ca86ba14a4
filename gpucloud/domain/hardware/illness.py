"""Whether the GPUs of a node may still be trusted while an attempt runs on them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from gpucloud.domain.hardware.gpus import GpuSample
from gpucloud.domain.hardware.xids import Xid, XidClass, pci_address, xid_class, xid_means

_SILENT = timedelta(seconds=30)  # nvidia-smi answers within a second; a driver that hangs never does
_LOST = timedelta(seconds=10)
_MISSING = timedelta(seconds=5)
_LOST_WORDS = ("gpu is lost", "unable to determine the device handle", "fallen off the bus")


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """What was seen of the node's GPUs: at the attempt's start (`before`) and now.

    `silent` is how long nvidia-smi has not told of any device, `said` its last words that were no figures;
    `missing` how long a device of `before` has been left out; `xids` the errors since the start.
    """

    before: tuple[GpuSample, ...]
    now: tuple[GpuSample, ...]
    silent: timedelta = timedelta(0)
    said: str = ""
    missing: timedelta = timedelta(0)
    xids: tuple[Xid, ...] = ()


def illness(signs: Signs) -> str | None:
    """Return why these GPUs must not be trusted any more, None while nothing speaks against them."""
    return _by_xid(signs) or _by_ecc(signs) or _by_silence(signs) or _by_absence(signs)


def absent(before: tuple[GpuSample, ...], now: tuple[GpuSample, ...]) -> tuple[GpuSample, ...]:
    """Return the devices that were there and are not."""
    there = {gpu.uuid for gpu in now}
    return tuple(gpu for gpu in before if gpu.uuid not in there)


def _by_xid(signs: Signs) -> str | None:
    """Only errors of the node's own devices count, and of the switches that join them.

    Several nodes may share one machine and its kernel log.
    """
    own = {pci_address(gpu.pci): gpu.index for gpu in signs.before}
    for xid in signs.xids:
        if xid.switch and len(signs.before) > 1:
            return f"a fatal error of an NVSwitch (SXid {xid.number})"
        place = pci_address(xid.pci)
        if xid_class(xid.number) is XidClass.BROKEN and place in own:
            return f"GPU {own[place]}: {xid_means(xid.number)} (Xid {xid.number})"
    return None


def _by_ecc(signs: Signs) -> str | None:
    counted = {gpu.uuid: gpu.ecc_uncorrected for gpu in signs.before}
    for gpu in signs.now:
        earlier = counted.get(gpu.uuid)
        if earlier is not None and gpu.ecc_uncorrected is not None and gpu.ecc_uncorrected > earlier:
            new = gpu.ecc_uncorrected - earlier
            return f"GPU {gpu.index}: {new} uncorrected memory error{'s' if new > 1 else ''} during the attempt"
    return None


def _by_silence(signs: Signs) -> str | None:
    lost = any(word in signs.said.lower() for word in _LOST_WORDS)
    if not signs.before or signs.silent < (_LOST if lost else _SILENT):
        return None
    said = f": {signs.said}" if signs.said else ""
    return f"nvidia-smi has told of no GPU for {signs.silent.total_seconds():.0f} s{said}"


def _by_absence(signs: Signs) -> str | None:
    gone = absent(signs.before, signs.now)
    if not gone or not signs.now or signs.missing < _MISSING:
        return None
    return f"GPU {gone[0].index} ({gone[0].uuid}) is no longer listed"
