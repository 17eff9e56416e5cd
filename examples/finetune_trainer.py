"""Put depth reads into a pretrained model and fine-tune it with Hugging Face's own Trainer (needs accelerate).

    python examples/finetune_trainer.py --model Qwen/Qwen3-0.6B --text my_text.txt --out models/mine --steps 500

At the first step the model computes what it computed before; what it leaves is loaded with `attnres.models.load`.
"""

from pathlib import Path

import torch
import tyro
from transformers import AutoTokenizer, Trainer, TrainingArguments

from attnres.cli import carry_out
from attnres.models import convert


def main(
    model: str,
    text: Path,
    out: Path,
    steps: int = 100,
    batch: int = 4,
    length: int = 256,
    blocks: int = 4,
    lr: float = 2e-5,
) -> Trainer:
    """Fine-tune `model`, a folder or hub name, on windows of `length` tokens of a text file."""
    network = convert(model, "block", num_blocks=blocks, dtype="fp32")
    print(network.conversion)
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = torch.tensor(tokenizer(text.read_text(encoding="utf-8"))["input_ids"])
    windows = [{"input_ids": part, "labels": part} for part in ids.split(length) if len(part) == length]

    settings = TrainingArguments(
        str(out),
        max_steps=steps,
        learning_rate=lr,
        weight_decay=0.1,  # of weight matrices: queries and gains have none
        per_device_train_batch_size=batch,
        dataloader_pin_memory=torch.cuda.is_available(),
        logging_steps=10,
        save_strategy="no",
        report_to=[],
    )
    trainer = Trainer(network, settings, train_dataset=windows)
    trainer.train()
    trainer.save_model()
    tokenizer.save_pretrained(out)
    return trainer


if __name__ == "__main__":
    carry_out(lambda: tyro.cli(main))  # what is wrong with the input is one sentence
