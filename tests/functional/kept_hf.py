"""A Hugging Face Trainer as its users write it: it resumes from the newest checkpoint in `out`, saves often."""

import sys
import time
from pathlib import Path

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

total, pause = int(sys.argv[2]), float(sys.argv[3])


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x.sum()}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        return {"loss": ((self.layer(x)[:, 0] - labels) ** 2).mean()}


class Slowly(TrainerCallback):
    def on_train_begin(self, args, state, control, **_):
        print("begins at", state.global_step, flush=True)

    def on_step_end(self, args, state, control, **_):
        time.sleep(pause)

    def on_train_end(self, args, state, control, **_):
        print("ends at", state.global_step, flush=True)


arguments = TrainingArguments(
    output_dir="out",
    max_steps=total,
    save_steps=10,
    save_total_limit=2,
    per_device_train_batch_size=4,
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
    enable_jit_checkpoint=True,  # on SIGTERM it saves, three seconds later, and ends with exit code 0
)
trainer = Trainer(model=Model(), args=arguments, train_dataset=Points(), callbacks=[Slowly()])
trainer.train(resume_from_checkpoint=get_last_checkpoint("out") if Path("out").is_dir() else None)
