"""A Lightning Trainer as its users write it: it resumes from `out/last.ckpt`, saves every 10 steps and when it ends."""

import sys
import time

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from pytorch_lightning.plugins.environments import LightningEnvironment

total, pause = int(sys.argv[2]), float(sys.argv[3])


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        return ((self.layer(batch[0])[:, 0] - batch[0].sum(1)) ** 2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Slowly(Callback):
    def on_train_start(self, trainer, _):
        print("begins at", trainer.global_step, flush=True)

    def on_train_batch_end(self, *_):
        time.sleep(pause)

    def on_exception(self, trainer, _, exception):
        print("asked at", trainer.global_step, type(exception).__name__, flush=True)


saving = ModelCheckpoint(
    dirpath="out",
    every_n_train_steps=10,
    save_last=True,
    save_on_exception=True,  # SIGTERM ends the loop by an exception after the step, and the exit code is 0
)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(100_000, 4)), batch_size=4)
trainer = pl.Trainer(
    max_steps=total,
    accelerator="cpu",
    devices=1,
    logger=False,
    plugins=[LightningEnvironment()],  # one process, whatever else is installed
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[saving, Slowly()],
)
trainer.fit(Model(), data, ckpt_path="last")
print("ends at", trainer.global_step, flush=True)
