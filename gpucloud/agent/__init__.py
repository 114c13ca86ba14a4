"""gpucloud's process on a node: standard library only, shipped as the zip of the package."""
