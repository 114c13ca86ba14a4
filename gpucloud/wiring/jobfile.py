"""Job files, what they name of the caller's environment, and this machine itself looked at."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gpucloud import smi
from gpucloud.adapters.home import Home
from gpucloud.domain.codec import to_json
from gpucloud.domain.errors import GpucloudError, NodeError, UsageError
from gpucloud.domain.job.spec import Job
from gpucloud.domain.node.gate.report import GateOrder, GateWanted
from gpucloud.domain.vendoring import Forge
from gpucloud.ports import Account
from gpucloud.usecases.machines import Check, Here
from gpucloud.usecases.supervise.needs import parse_checked

if TYPE_CHECKING:
    from gpucloud.adapters.packaging import Installed


def sample_job(name: str, run: str, *, full: bool) -> str:
    """Return a job file for a job of that name that runs that script: a short one, or one with every key."""
    from gpucloud.adapters import jobfile

    return jobfile.sample_job(name, run, full=full)


def job_templates() -> dict[str, str]:
    """Return the names of the jobs that come along, each with what it is."""
    from gpucloud.adapters import jobfile

    return jobfile.job_templates()


def template_job(template: str, name: str) -> tuple[str, dict[Path, bytes]]:
    """Return the text of a template's job file, and its code by relative path."""
    from gpucloud.adapters import jobfile

    return jobfile.template_job(template, name)


def job_schema() -> dict[str, object]:
    """Return the JSON Schema of job files."""
    from gpucloud.adapters import jobfile

    return jobfile.json_schema()


def read_secrets(job: Job) -> dict[str, str]:
    """Return the values of the job's secrets from the caller's environment."""
    missing = [name for name in job.secrets if name not in os.environ]
    if missing:
        raise UsageError(f"secrets: {', '.join(missing)} not set in the environment", hint=f"export {missing[0]}=…")
    return {name: os.environ[name] for name in job.secrets}


# Looking at this machine itself: what gpucloud needs, then its GPUs by the code that nodes run.


_LEAST_FREE = 5 << 30
_LIMIT_S = 400.0


def look_here(home: Home, account: Callable[[], Account], *, full: bool) -> Here:
    """Return how this machine is; with `full`, its GPUs are put to work with this interpreter's torch."""
    checks = (_python(), _terraform(home), _disk(home), _aws(account))
    count = len(smi.gpus()[0] or ())
    order = GateOrder(wanted=GateWanted(gpus=count, full=full, torch=full), digest="", python=sys.executable)
    root = home.root / "cache" / "doctor"
    argv = (sys.executable, "-m", "gpucloud.agent", "gate", "--root", str(root))
    try:
        done = subprocess.run(argv, input=to_json(order).encode(), capture_output=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise NodeError("the check of this machine's GPUs does not end", hint="nvidia-smi") from error
    checked = parse_checked(done.stdout)
    if checked is None:
        raise NodeError(f"the check of this machine failed: {done.stderr.decode(errors='replace').strip()[-300:]}")
    return Here(checks=checks, checked=checked)


def _python() -> Check:
    return Check(name="Python", ok=True, text=f"{sys.version.split()[0]} ({sys.executable})")


def _terraform(home: Home) -> Check:
    from gpucloud.adapters.terraform.program import require_terraform

    cache = home.root / "cache" / "terraform.json"
    try:
        program = require_terraform(os.environ, cache, tools=home.tools)
    except GpucloudError as error:
        return Check(name="Terraform", ok=None, text=f"{error.message}; needed for AWS only", hint=error.hint)
    return Check(name="Terraform", ok=True, text=str(program))


def _disk(home: Home) -> Check:
    folder = next(path for path in (home.root, *home.root.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    text = f"{free / 2**30:.1f} GiB free at {folder}"
    return Check(name="disk", ok=free >= _LEAST_FREE, text=text, hint="free 5 GiB there")


def _aws(account: Callable[[], Account]) -> Check:
    if not _has_credentials():
        return Check(
            name="AWS",
            ok=None,
            text="no credentials; needed for cloud: aws only",
            hint="aws sso login, aws configure, or AWS_PROFILE=…",
        )
    try:
        caller = account().caller()
    except GpucloudError as error:
        return Check(name="AWS", ok=False, text=error.message, hint=error.hint)
    return Check(name="AWS", ok=True, text=f"{caller.arn}, region {caller.region}")


def _has_credentials() -> bool:
    """Whether the user set any up: nobody is asked, so that a machine without AWS waits for nothing."""
    names = ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_FULL_URI")
    files = (os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"), "~/.aws/config")
    return any(name in os.environ for name in names) or any(_is_file(file) for file in files)


def _is_file(written: str) -> bool:
    return os.path.isfile(os.path.expanduser(written))  # noqa: PTH111, PTH113  these never raise


# What a repository's CI is given.


def install_pipeline(folder: Path, forges: frozenset[Forge], *, force: bool) -> Installed:
    """Put pipelines and what they install into the repository around `folder`; see `gpucloud.adapters.packaging`."""
    from gpucloud.adapters import packaging

    return packaging.install_pipeline(folder, forges, force=force)
