"""A small GPT in plain PyTorch, no Transformers: the standard residual and Attention Residuals side by side.

python examples/plain_pytorch.py                # about a minute on 2 cores, on the sources of Python's own library
python examples/plain_pytorch.py my_text.txt    # or on a file or folder of text (.txt, .jsonl, .csv, .parquet, ...)

What makes it an AttnRes model are the four lines marked <-. Tokens are bytes. Both models start from the same weights
and see the same batches, in turn. A minute and one seed say how it is written and what it costs, not which is better:
that is docs/results/index.md.
"""

import argparse
import math
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import attnres
from attnres.cli import carry_out
from attnres.data import open_source

# ------------------------------------------------------------------ the model


class Attention(nn.Module):
    """Causal self-attention, (batch, time, width) -> the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time_, width = x.shape
        q, k, v = self.qkv(x).view(batch, time_, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time_, width))


class MLP(nn.Sequential):
    """Two matrices and a GELU between them."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False))


class GPT(nn.Module):
    """A pre-norm decoder whose sublayers are connected by `residual`: "standard", "block", "full", ..."""

    def __init__(
        self, residual: str, *, vocab: int, context: int, width: int, heads: int, layers: int, **settings: int
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.sublayers = nn.ModuleList(m for _ in range(layers) for m in (Attention(width, heads), MLP(width)))
        self.norms = nn.ModuleList(nn.RMSNorm(width, eps=1e-6) for _ in range(2 * layers + 1))
        self.head = nn.Linear(width, vocab, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                scale = math.sqrt(2 * layers) if name.endswith(("out.weight", ".2.weight")) else 1.0
                nn.init.normal_(weight, std=0.02 / scale)
        # After the draws above, so that every residual begins with the same weights. L = 2 * layers sublayers.
        self.residual = attnres.make_residual(residual, 2 * layers, width, **settings)

    def forward(self, ids: Tensor) -> Tensor:
        state = self.residual.start(self.tokens(ids) + self.positions.weight[: ids.shape[1]])  # <-
        for index, (sublayer, norm) in enumerate(zip(self.sublayers, self.norms)):
            x, state = self.residual.read(state, index, as_value(norm))  # <-  x = norm(x) of a standard residual
            state = self.residual.write(state, index, sublayer(x))  # <-  x = x + f(x)
        return self.head(self.residual.finish(state, as_value(self.norms[-1])))  # <-


def as_value(norm: nn.Module) -> attnres.Norm:
    """The norm after a read as a value: it is then made in the same pass (a module works too, in a pass of its own)."""
    assert isinstance(norm, nn.RMSNorm) and norm.eps is not None
    return attnres.Norm(norm.weight, eps=norm.eps)


def optimizers_of(model: GPT, steps: int) -> list[tuple[torch.optim.Optimizer, LambdaLR]]:
    """Muon for the sublayers' matrices, AdamW for the rest, at a tenth of the rate for the residual; cosine decay."""
    matrices, reads = list(model.sublayers.parameters()), list(model.residual.parameters())
    inner = ("sublayers.", "residual.")
    rest = [parameter for name, parameter in model.named_parameters() if not name.startswith(inner)]
    groups = [{"params": rest}, {"params": reads, "lr": 4e-4}]
    optimizers = [
        torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    return [(o, LambdaLR(o, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps)))) for o in optimizers]


# ------------------------------------------------------------------ the text and the run


def load_bytes(source: str, context: int) -> tuple[Tensor, Tensor]:
    """Training and held-out bytes: the first nine tenths of the text and the last."""
    text = "\n\n".join(open_source(source, limit=8_000_000).read()).encode()
    if len(text) <= 10 * (context + 1):
        raise attnres.UserError(f"{source} has {len(text)} bytes: expected more than {10 * (context + 1)}")
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]


def windows(data: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets (windows, context) that begin at `starts`."""
    rows = data[starts[:, None] + torch.arange(context + 1)].long()
    return rows[:, :-1], rows[:, 1:]


def main(source: str = "stdlib", *, steps: int = 150, width: int = 128, layers: int = 6, context: int = 128) -> None:
    batch = 16
    train, held_out = load_bytes(source, context)
    models = {}
    for name in ("standard", "block"):
        torch.manual_seed(0)
        models[name] = GPT(name, vocab=256, context=context, width=width, heads=4, layers=layers)
    optimizers = {name: optimizers_of(model, steps) for name, model in models.items()}
    order = torch.Generator().manual_seed(0)
    seconds = dict.fromkeys(models, 0.0)
    print(f"{len(train):,} bytes, {sum(p.numel() for p in models['standard'].parameters()):,} parameters")
    for step in range(1, steps + 1):
        inputs, targets = windows(train, torch.randint(len(train) - context, (batch,), generator=order), context)
        losses = {}
        for name, model in models.items():
            began = time.perf_counter()
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, schedule in optimizers[name]:
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            seconds[name] += time.perf_counter() - began
            losses[name] = loss.item()
        if step % max(1, steps // 10) == 0:
            print(f"step {step:4}  " + "  ".join(f"{name} {loss:.3f}" for name, loss in losses.items()))

    inputs, targets = windows(held_out, torch.linspace(0, len(held_out) - context - 1, 64).long(), context)
    rows = {}
    for name, model in models.items():
        with torch.no_grad():
            loss = F.cross_entropy(model(inputs).transpose(1, 2), targets, reduction="none")
        rows[name] = loss.mean(1)
        speed = steps * batch * context / seconds[name]
        print(f"{name:8} held-out loss {rows[name].mean():.3f} nats a byte, {speed:,.0f} tokens/s")
    difference = rows["block"] - rows["standard"]
    error = difference.std() / math.sqrt(len(difference))
    print(f"block - standard: {difference.mean():+.3f} ± {error:.3f} over windows, one seed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", default="stdlib")
    for name, value in (("steps", 150), ("width", 128), ("layers", 6), ("context", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    carry_out(lambda: main(**vars(arguments)))  # what is wrong with the input is one sentence
