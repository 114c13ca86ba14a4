"""`plan`: what would be rented, what it is going to cost, and when it will be done."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from gpucloud.cli.commands.training import introduce, remark, warn
from gpucloud.cli.render.estimates import deadline_chart, estimate_json, estimate_text
from gpucloud.cli.render.words import say_json, say_words, tell, width_of
from gpucloud.cli.target import of_another_file, read_target
from gpucloud.domain.errors import CredentialsError, UsageError
from gpucloud.domain.job.spec import Cloud, Job
from gpucloud.wiring import Gpucloud, how_it_saves


def plan(target: str | None, *, on: Cloud | None, plot: Path | None, as_json: bool) -> int:
    """Say what would be rented and what it costs; nothing is made. Return the exit code."""
    cloud = Gpucloud()
    read = read_target(cloud, target, on)
    job = read.job
    protection = how_it_saves(job)
    drawn = cloud.plot(plot) if plot is not None else None
    named = _named(cloud, job)
    offline = named is not None or not _is_known(cloud, job)
    job = named or job
    estimate = cloud.estimator(job, protection.saving, offline=offline).estimate(job)
    if drawn is not None:
        drawn.save([deadline_chart(job, estimate)], title=f"{job.name}: cost against deadline")
    if as_json:
        say_json(estimate_json(job, estimate, protection))
    else:
        say_words(estimate_text(job, estimate, width=width_of(sys.stdout), protection=protection))
    if plot is not None:
        tell(f"drawn: {plot}")
    warn(protection)
    if (other := of_another_file(cloud, read)) is not None:
        tell(f"warning: {other.name} is a run of {other.file}: `gpucloud train` asks for another name, or for --adopt")
    _warn_of_secrets(cloud, job)
    if not offline:
        remark(cloud, job, estimate.plan)
    else:
        tell(cloud.aws(job.aws, job.resources).way_in(estimate.plan.offer))
    return 0


def _named(cloud: Gpucloud, job: Job) -> Job | None:
    """Return the job of somebody who has named no AWS region as it is in all that the catalog knows; else None."""
    widened = everywhere(cloud, job)
    if widened is not None:
        tell("no AWS region is named (`resources: {regions: [us-east-1]}`, or AWS_REGION): planned by list prices")
        tell(cloud.aws(widened.aws, widened.resources).list_remark())
    return widened


def everywhere(cloud: Gpucloud, job: Job) -> Job | None:
    """Return the job in every region whose list prices are known; None where it, or AWS_REGION, names one."""
    aws = cloud.aws(job.aws, job.resources) if job.cloud is Cloud.AWS and not job.resources.regions else None
    if aws is None or aws.aws.knows_region:
        return None
    return replace(job, resources=replace(job.resources, regions=tuple(aws.catalog.prices)))


def _warn_of_secrets(cloud: Gpucloud, job: Job) -> None:
    try:
        cloud.require_secrets(job)
    except UsageError as missing:
        tell(f"warning: {missing.message}: `gpucloud train` is refused; {missing.hint}")


def _is_known(cloud: Gpucloud, job: Job) -> bool:
    """Say who pays; without credentials for AWS, say what the plan is made from instead."""
    try:
        introduce(cloud, job)
    except CredentialsError as error:
        if job.cloud is not Cloud.AWS:
            raise
        tell(error.message)
        tell("planned by the catalog's prices instead; spot prices that were never read are estimates of AWS's advisor")
        tell(cloud.aws(job.aws, job.resources).list_remark())
        return False
    return True
