"""Exact resume for training scripts: `import gpucloud.resume as resume`."""
