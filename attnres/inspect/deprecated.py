"""Edits by their earlier names, which work for one more version and warn: each is an `Ablate` or a `Reweigh` today."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnres.errors import UserError
from attnres.inspect.edits import Ablate, Reads, Reweigh, Tokens

KnockOut = Ablate


def Uniform(reads: Reads = None, tokens: Tokens = None) -> Reweigh:
    """Return the edit that gives every source the same weight."""
    return Reweigh(lambda p, names: p.mean(-1, keepdim=True), reads, tokens)


def Recency(reads: Reads = None, tokens: Tokens = None) -> Reweigh:
    """Return the edit that gives the newest source the weight 1."""
    return Reweigh(lambda p, names: torch.eye(len(names))[len(names) - 1 - (names[-1] == "null")], reads, tokens)


def Pin(weights: Any, reads: str | int, tokens: Tokens = None) -> Reweigh:
    """Return the edit that gives a read these weights, a row, (T, n) or (B, T, n). Raises UserError for several."""
    if not isinstance(reads, str | int):
        raise UserError(f"weights of the reads {reads!r} were given at once: give one Reweigh for each")
    return Reweigh(lambda p, names: weights, reads, tokens)


def Swap(a: int, b: int, reads: Reads = None) -> Reweigh:
    """Return the edit by which tokens at positions a and b exchange their weights."""

    def swapped(p: Tensor, names: Sequence[str]) -> Tensor:
        order = torch.arange(p.shape[1], device=p.device)
        order[[a, b]] = order[[b, a]]
        return p[:, order]

    return Reweigh(swapped, reads)


def AddLogit(source: str, delta: float, reads: Reads = None, tokens: Tokens = None) -> Reweigh:
    """Return the edit that adds `delta` to a source's logit; of weights that do not sum to one, it multiplies the
    source's by e^delta."""

    def raised(p: Tensor, names: Sequence[str]) -> Tensor:
        scaled = p * torch.tensor([math.exp(delta) if name == source else 1.0 for name in names]).to(p)
        total = p.sum(-1, keepdim=True)
        is_softmax = (total - 1).abs().max() < 1e-3
        return scaled / scaled.sum(-1, keepdim=True) if is_softmax else scaled

    return Reweigh(raised, reads, tokens)
