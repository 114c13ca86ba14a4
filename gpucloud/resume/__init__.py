"""Exact resume for training scripts: `import gpucloud.resume as resume`.

    run = resume.init(model=ddp, optimizer=opt, scheduler=sched)   # place, cadence, attempt come from the job
    loader = run.loader(dataset, global_batch=256)
    for batch in loader:                                           # continues at the exact sample
        loss = train_step(batch)
        run.step(loss=loss)                                        # saves when due; leaves on a notice
    run.done()

Outside gpucloud the same script keeps its checkpoints in `./.gpucloud-checkpoints` and continues from them; on SIGTERM
or SIGUSR1 it saves and leaves with exit code 75.
"""

from __future__ import annotations

from gpucloud.resume.loader import Loader
from gpucloud.resume.restoring import Peek, peek
from gpucloud.resume.run import Run, init
from gpucloud.resume.settings import import_ahead
from gpucloud.store.checkpoints import Fenced

__all__ = ["Fenced", "Loader", "Peek", "Run", "init", "peek"]

import_ahead()
