"""torchrun --nproc-per-node=2 train.py --steps 200

Supervised fine-tuning by LoRA: a language model learns answers, and of its weights only those that peft adds are
trained. It may be interrupted at any step: the two lines with `resumable` are all that takes.
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from gpucloud.frameworks.huggingface import resumable

CHARACTERS = "\n0123456789+= "  # the first ends an answer, and fills up a batch
LONGEST = 12


class Sums(torch.utils.data.Dataset):
    """Questions `7+5=` with their answers; the loss is that of the answer alone."""

    def __init__(self, count, *, seed):
        self.pairs = torch.randint(10, (count, 2), generator=torch.Generator().manual_seed(seed)).tolist()

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        one, other = self.pairs[index]
        question, answer = f"{one}+{other}=", f"{one + other}\n"
        codes = [CHARACTERS.index(character) for character in question + answer]
        return {"input_ids": codes, "labels": [-100] * len(question) + codes[len(question) :]}


def collate(samples):
    """Return a batch, filled up at the right."""
    filled = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    rows = [{**one, "attention_mask": [1] * len(one["input_ids"])} for one in samples]
    return {
        name: torch.tensor([row[name] + [by] * (LONGEST - len(row[name])) for row in rows])
        for name, by in filled.items()
    }


def make_model(name, revision):
    """Return a model of the hub or a folder; without a name, a small one with random weights."""
    if name:
        return AutoModelForCausalLM.from_pretrained(name, revision=revision)
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(CHARACTERS), max_position_embeddings=64, **small))


def main():
    parser = argparse.ArgumentParser(description="Fine-tune a language model by LoRA.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--model", default="", help="a model of the hub, or a folder")
    parser.add_argument("--revision", default="main", help="its commit: a run that goes on is to have the same weights")
    args = parser.parse_args()

    gpu = torch.cuda.is_available()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lora = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear")
    model = get_peft_model(make_model(args.model, args.revision), lora)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir="out",
            max_steps=args.steps,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            learning_rate=5e-3,
            warmup_steps=10,
            logging_steps=20,
            save_strategy="no",  # what the run saves is enough
            bf16=gpu,
            use_cpu=not gpu,
            dataloader_pin_memory=gpu,
            disable_tqdm=True,
            report_to=[],
        ),
        train_dataset=Sums(4096, seed=0),
        data_collator=collate,
    )
    trainer = resumable(trainer)
    trainer.train()

    if trainer.is_world_process_zero():
        model.save_pretrained("adapter")
        print(f"step {trainer.state.global_step} of {args.steps}: adapter/ has the weights that were added", flush=True)


if __name__ == "__main__":
    main()
