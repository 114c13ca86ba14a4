"""Two ranks, one of which has less than the other: neither waits for what never comes, and both go on."""

import sys

from gpucloud.resume import ranks
from tests.standins.saved_runs import PREFIX, SavedRun, forking


def committed(run):
    return sorted(int(path.stem) for path in (run.folder / "store" / PREFIX / "commit").glob("*/*.json"))


def test_where_one_rank_has_no_memory_none_saves_until_it_has(tmp_path, monkeypatch):
    run = SavedRun(tmp_path / "run", ranks=2)

    def short_twice(rank):
        monkeypatch.setattr(sys, "stderr", sys.__stderr__)
        found = [{"on the machine:x": 1000 if rank else 2**40}] * 2
        monkeypatch.setattr(ranks, "free_memory", lambda: found.pop() if found else {"on the machine:x": 2**40})

    with forking():
        assert run.attempt(short_twice) == [0, 0]
    assert committed(run) == [4, 6]
    said = "nothing can be saved, there is no memory for it"
    assert (run.said(0).count(said), run.said(1).count(said)) == (1, 0)
