"""torchrun --nproc-per-node=2 train.py --steps 300

Hugging Face's Trainer, and a small GPT-2 that learns to continue sequences. It may be interrupted at any step: the two
lines with `resumable` are all that takes.
"""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from gpucloud.frameworks.huggingface import resumable

NUMBERS = 32  # the vocabulary
LENGTH = 24


class Sequences(torch.utils.data.Dataset):
    """Numbers that go on by the same stride, modulo 32: whoever has seen two knows the third."""

    def __init__(self, count, *, seed):
        drawn = torch.randint(NUMBERS, (2, count, 1), generator=torch.Generator().manual_seed(seed))
        self.numbers = (drawn[0] + drawn[1] * torch.arange(LENGTH)) % NUMBERS

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        return {"input_ids": self.numbers[index], "labels": self.numbers[index]}


def main():
    parser = argparse.ArgumentParser(description="Train a small GPT-2 with Hugging Face's Trainer.")
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()

    gpu = torch.cuda.is_available()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=NUMBERS, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4))
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir="out",
            max_steps=args.steps,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            warmup_steps=20,
            logging_steps=20,
            eval_strategy="steps",
            eval_steps=100,
            save_strategy="no",  # what the run saves is enough
            bf16=gpu,
            use_cpu=not gpu,
            dataloader_pin_memory=gpu,
            disable_tqdm=True,
            report_to=[],
        ),
        train_dataset=Sequences(4096, seed=0),
        eval_dataset=Sequences(256, seed=1),
    )
    trainer = resumable(trainer)
    trainer.train()

    if trainer.is_world_process_zero():
        trainer.save_model("out/model")
        print(f"step {trainer.state.global_step} of {args.steps}: done", flush=True)


if __name__ == "__main__":
    main()
