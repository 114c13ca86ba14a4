"""`python -m gpucloud`."""
