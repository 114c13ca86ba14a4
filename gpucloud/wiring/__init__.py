"""The one composition root: job and environment in, adapters out. Late imports live here, so that `--help` is quick."""

from gpucloud.adapters.handbook import find as find_page
from gpucloud.adapters.handbook import pages as handbook
from gpucloud.adapters.home import Home
from gpucloud.adapters.scripts import how_it_saves, imports_resume
from gpucloud.adapters.transfer.localfiles import local_tree as local_folder
from gpucloud.adapters.transfer.localfiles import sent as local_file
from gpucloud.domain.job.spec import KnownJob
from gpucloud.wiring.jobfile import install_pipeline, job_schema, job_templates, sample_job, template_job
from gpucloud.wiring.root import Gpucloud

__all__ = [
    "Gpucloud",
    "Home",
    "KnownJob",
    "find_page",
    "handbook",
    "how_it_saves",
    "imports_resume",
    "install_pipeline",
    "job_schema",
    "job_templates",
    "local_file",
    "local_folder",
    "sample_job",
    "template_job",
]
