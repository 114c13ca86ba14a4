"""gpucloud's version; imports nothing, so that in-script and on-node code stay light."""

__version__ = "0.1.0"
