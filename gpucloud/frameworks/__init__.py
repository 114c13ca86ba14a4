"""Training frameworks whose loops are their own: each module makes one of them save and resume by `gpucloud.resume`.

A framework is imported by its module alone, so that nobody needs one who does not use it.
"""

from __future__ import annotations

from gpucloud.domain.errors import UsageError


def keeps_by_itself(hint: str) -> UsageError:
    """Return the refusal of DeepSpeed, with how its own checkpoints are kept."""
    return UsageError("DeepSpeed keeps weights and optimizer where no other checkpoint finds them", hint=hint)
