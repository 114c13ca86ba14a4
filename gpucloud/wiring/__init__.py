"""The one composition root: job and environment in, adapters out. Late imports live here, so that `--help` is quick."""

from gpucloud.adapters.home import Home, KnownJob
from gpucloud.wiring.root import Gpucloud, job_schema, read_secrets, sample_job

__all__ = ["Gpucloud", "Home", "KnownJob", "job_schema", "read_secrets", "sample_job"]
