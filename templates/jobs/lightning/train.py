"""torchrun --nproc-per-node=2 train.py --epochs 10

Lightning's Trainer, and a small denoising autoencoder of waves. It may be interrupted at any step: the callback is all
that takes.
"""

import argparse
import math
import os

import lightning.pytorch as pl
import torch
from torch import nn

from gpucloud.frameworks.lightning import Resumable

POINTS = 64


class Waves(torch.utils.data.Dataset):
    """Sums of two sines, each by two of torch's random numbers."""

    def __init__(self, count, *, seed):
        drawn = torch.rand(2, 2, count, 1, generator=torch.Generator().manual_seed(seed))
        times = torch.arange(POINTS) / POINTS
        self.waves = torch.sin(2 * math.pi * (1 + 7 * drawn[0]) * times + 2 * math.pi * drawn[1]).sum(0) / 2

    def __len__(self):
        return len(self.waves)

    def __getitem__(self, index):
        wave = self.waves[index]
        return wave + 0.3 * torch.randn(POINTS), wave  # any generator may be used: each batch finds it seeded


class Denoiser(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(POINTS, 128), nn.GELU(), nn.Dropout(0.05), nn.Linear(128, POINTS))

    def training_step(self, batch, _):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, _):
        self.log("held_out", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def on_validation_epoch_end(self):
        if self.trainer.is_global_zero and not self.trainer.sanity_checking:
            held_out = self.trainer.callback_metrics["held_out"].item()
            print(f"epoch {self.current_epoch + 1}, step {self.global_step}: held out {held_out:.4f}", flush=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "held_out"}}


def main():
    parser = argparse.ArgumentParser(description="Train a small denoising autoencoder with Lightning.")
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    gpu = torch.cuda.is_available()
    torch.set_num_threads(1)
    pl.seed_everything(0, verbose=False)
    here, world = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("WORLD_SIZE", "1"))
    trainer = pl.Trainer(
        max_epochs=args.epochs,
        accelerator="gpu" if gpu else "cpu",
        devices=here,
        num_nodes=world // here,
        strategy="ddp" if world > 1 else "auto",
        callbacks=[Resumable()],
        enable_checkpointing=False,  # what the run saves is enough
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    train = torch.utils.data.DataLoader(Waves(4096, seed=0), batch_size=32, shuffle=True)
    held_out = torch.utils.data.DataLoader(Waves(512, seed=1), batch_size=64)
    trainer.fit(Denoiser(), train, held_out)


if __name__ == "__main__":
    main()
