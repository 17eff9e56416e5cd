"""Does a model copy? Its loss on random tokens, and on the same tokens once more in the same sequence.

    python experiments/copying.py runs/studies/micro/rivals/*/*-seed* --out copying.csv

Nothing but the first half of a sequence says what stands in the second. A model that looks back for an earlier
occurrence and continues as it did (an induction head) loses less there; in small models this comes late, within a few
hundred steps, and the held-out loss falls with it. So runs of which some have learnt it by their last step and some
have not are two kinds of runs.

Source: arXiv 2209.11895 ("In-context Learning and Induction Heads"): repeated random tokens, a bump in the loss.
"""

from pathlib import Path

import torch
import tyro
from torch import nn

from attnres.cli import carry_out
from attnres.errors import UserError
from attnres.files import write_text
from attnres.head import evaluating, next_token_losses
from attnres.models.open import open_checkpoint
from attnres.reading import read_json
from attnres.text import csv_text

FIELDS = ("run", "loss", "new", "repeated", "gain")


def losses(model: nn.Module, vocab_size: int, *, length: int, sequences: int, seed: int = 0) -> tuple[float, float]:
    """Mean loss in nats of `length` random tokens, and of their repetition, but for the first of either."""
    tokens = torch.randint(vocab_size, (sequences, length), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad(), evaluating(model):
        each = next_token_losses(model, tokens.repeat(1, 2))
    return each[:, : length - 1].mean().item(), each[:, length:].mean().item()


def main(runs: tyro.conf.Positional[tuple[Path, ...]], *, out: Path, length: int = 64, sequences: int = 32) -> None:
    """Measure the models of finished runs; folders without a model are passed over.

    Args:
        runs: run folders.
        out: CSV, a row for each: its held-out loss, that of new tokens, of repeated ones, and what repetition gains.
        length: tokens that are repeated. sequences: of such, the same for every model.
    """
    rows = []
    for folder in runs:
        if not (folder / "model").is_dir() or not (folder / "summary.json").is_file():
            continue
        checkpoint = open_checkpoint(str(folder))
        if checkpoint.vocab_size is None or checkpoint.context < 2 * length:
            raise UserError(f"{folder} reads {checkpoint.context} tokens: give a --length of at most half of them")
        new, repeated = losses(checkpoint.load("fp32"), checkpoint.vocab_size, length=length, sequences=sequences)
        held_out = read_json(folder / "summary.json")["val_loss"]
        name = "/".join(folder.resolve().parts[-3:])
        rows.append((name, *(f"{one:.4f}" for one in (held_out, new, repeated, new - repeated))))
        print(*rows[-1], flush=True)
    if not rows:
        raise UserError("no finished run with a model among these: give run folders, with model/ and summary.json")
    write_text(out, csv_text(FIELDS, rows))


if __name__ == "__main__":
    carry_out(lambda: tyro.cli(main))
