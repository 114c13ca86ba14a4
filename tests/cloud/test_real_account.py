"""The proof on a real account. Never run by default: `GPUCLOUD_YES_SPEND_5_USD=1 python -m pytest -m cloud`."""

from __future__ import annotations

from os import environ

import pytest

from tests.cloud import run


@pytest.mark.cloud
@pytest.mark.enable_socket
@pytest.mark.timeout(3 * 3600)
def test_the_whole_proof_holds_on_a_real_account() -> None:
    assert environ.get("GPUCLOUD_YES_SPEND_5_USD"), "it rents machines: export GPUCLOUD_YES_SPEND_5_USD=1"

    assert run.main(["--yes-spend-5-usd"]) == 0
