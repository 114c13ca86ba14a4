"""torch.distributed.checkpoint on several nodes as its users write it: a folder a save, the newest is loaded."""

import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

total, pause = int(sys.argv[2]), float(sys.argv[3])
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
dist.init_process_group("gloo")
weights = {f"layer{n}": torch.zeros(64, 64) for n in range(8)}  # replicas: each is in one rank's file only
state = {"weights": weights, "step": torch.zeros(1)}

saved = sorted(int(path.name[5:]) for path in Path("out").glob("step-*"))
if saved:
    dcp.load(state, checkpoint_id=f"out/step-{saved[-1]}")
    assert int(state["step"]) == saved[-1]
    for number, value in enumerate(weights.values()):
        assert torch.equal(value, torch.full((64, 64), saved[-1] + number / 10))
step = int(state["step"])
print("begins at", step, flush=True)
while step < total:
    step += 1
    time.sleep(pause)
    state["step"].fill_(step)
    for number, value in enumerate(weights.values()):
        value.fill_(step + number / 10)
    ending = torch.tensor([float(bool(asked))])
    dist.all_reduce(ending)  # all stop at one step, whichever of them was asked
    if step % 10 == 0 or ending:
        dcp.save(state, checkpoint_id=f"out/step-{step}")
    if ending:
        print("asked at", step, flush=True)
        break
dist.destroy_process_group()
