"""Terraform behind the `Provisioner` port; the only place that knows python_terraform."""

from __future__ import annotations

from gpucloud.adapters.terraform.program import find_terraform
from gpucloud.adapters.terraform.stack import TerraformProvisioner

__all__ = ["TerraformProvisioner", "find_terraform"]
