"""Scripts of real libraries, unchanged: asked to leave, killed, and resumed from what the keeper put back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpucloud.domain.job.spec import OnNotice
from tests.standins.kept_nodes import KeptNodes
from tests.standins.kept_script import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # libraries that take long to import, three times each
FRAMEWORKS = pytest.mark.engine(name="frameworks")
HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("program", "nodes", "said"),
    [
        pytest.param("kept_hf.py", 1, r"ends at (\d+)", marks=FRAMEWORKS),
        pytest.param("kept_lightning.py", 1, r"asked at (\d+) SIGTERMException", marks=FRAMEWORKS),
        ("kept_dcp.py", 2, r"asked at (\d+)"),
    ],
)
def test_a_library_saves_when_it_is_asked_and_goes_on_after_it_was_killed(tmp_path, program, nodes, said):
    job = KeptNodes(tmp_path, kind="dcp" if nodes > 1 else "auto", nodes=nodes, program=(HERE / program).read_text())
    try:
        job.start(steps=100_000, pause_s=0.02, on=OnNotice.SIGTERM)
        until(lambda: job.committed() or job.is_over(), "a commit", 600)
        assert job.committed(), job.said(0)
        job.ask_to_stop(within_s=300)
        assert job.ended(600) == [75] * nodes, job.said(0)
        asked = int(re.findall(said, job.said(0))[-1])
        assert job.committed()[0].commit.step == asked

        for node in range(nodes):
            job.lose_the_disk(node)
        job.start(steps=100_000, pause_s=0.02, on=OnNotice.SIGTERM)
        until(lambda: job.committed()[0].commit.step > asked or job.is_over(), "another commit", 600)
        job.kill()
        assert job.begun_at() == [asked] * nodes
        newest = job.committed()[0].commit.step

        job.start(steps=newest + 15, on=OnNotice.SIGTERM)
        assert job.ended(600) == [0] * nodes, job.said(0)
        assert job.begun_at() == [newest] * nodes
    finally:
        job.kill()
