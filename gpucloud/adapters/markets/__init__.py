"""The recorded spot markets that come with the package; sources and licences are in `recordings/NOTICE`."""

from __future__ import annotations

from gpucloud.adapters.markets.reader import PackagedMarkets

__all__ = ["PackagedMarkets"]
