"""The job file: YAML in, a frozen `Job` or every problem at once out."""

from __future__ import annotations

from gpucloud.adapters.jobfile.reader import read_job, spec_sha256
from gpucloud.adapters.jobfile.sample import job_templates, json_schema, sample_job, template_job

__all__ = ["job_templates", "json_schema", "read_job", "sample_job", "spec_sha256", "template_job"]
