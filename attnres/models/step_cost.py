"""Cost of a training step: floating-point operations, the share of a device's peak (MFU), and bytes that reads move.

Operations are counted as in PaLM (Chowdhery et al., arXiv 2204.02311, appendix B): for each token, two for each weight
that multiplies it, and 4 H Q T a layer for attention's scores and mixtures (H heads of size Q, T tokens; the causal
mask leaves none out); twice that again for the gradients. Recomputation (activation checkpointing), reads of a residual
and the recurrence of linear attention do not count: MFU is of the plain model's work, and falls by what these take.

Bytes are those between a device's memory and its cores, counted vector by vector: one vector of width d per token, in
the stream's dtype. Scalars per token (logits, maxima, 1/rms) and the one read of the output are left out. A Triton or C
kernel moves what is counted here; plain torch moves more. `benchmarks/traffic.py` counts other implementations with the
same unit, docs/explanation/kernels.md compares both with measured times.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from attnres.residuals import Residual, residual_class
from attnres.residuals.mechanisms.block import Block
from attnres.residuals.mechanisms.compose import Compose
from attnres.residuals.mechanisms.depth_attention import DepthAttention
from attnres.residuals.mechanisms.full import Full
from attnres.residuals.mechanisms.streams import ParallelStreams

PEAKS = {
    "B200": (2250e12, 80e12),
    "H200": (989.4e12, 66.9e12),
    "H100 PCIe": (756e12, 51.2e12),
    "H100": (989.4e12, 66.9e12),
    "A100": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
    "L4": (121e12, 30.3e12),
    "A10": (125e12, 31.2e12),
    "RTX 4090": (165.2e12, 82.6e12),
}
"""Part of a device's name -> dense operations a second in bf16 (sums in fp32) and in fp32 (without TF32): NVIDIA's data
sheets. The first that fits counts."""


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Return the operations a second that a device can do in "bf16" or "fp32"; None where nobody has written it down
    here."""
    # the sheets are of GPUs that CUDA runs, which rounds fp32 to TF32 if asked to
    if device.type != "cuda" or (dtype == "fp32" and torch.backends.cuda.matmul.allow_tf32):
        return None
    words = torch.cuda.get_device_name(device).replace("-", " ").split()
    for name, (bf16, fp32) in PEAKS.items():
        if set(name.split()) <= set(words):
            return bf16 if dtype == "bf16" else fp32
    return None


def forward_flops(model: Any, length: int) -> float:
    """Return the operations of a forward pass for each token of sequences of `length`."""
    return 2 * _multiplying(model) + _attention(model.config, length)


def step_flops(model: Any, length: int) -> float:
    """Return the same of a forward and a backward pass; a frozen weight has no gradient of its own."""
    gradients = 2 * (_multiplying(model) + _multiplying(model, trained=True)) + 2 * _attention(model.config, length)
    return forward_flops(model, length) + gradients


def _multiplying(model: Any, *, trained: bool = False) -> float:
    """Return the number of weights (of those that are trained) that multiply a token: of the experts' its share."""
    residual = getattr(model, "residual", None)
    apart = {id(p) for p in residual.parameters()} if isinstance(residual, nn.Module) else set()
    head = {id(p) for p in model.get_output_embeddings().parameters()}
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()} - head
    total = 0.0
    for name, parameter in model.named_parameters():
        if id(parameter) not in apart | tables and (parameter.requires_grad or not trained):
            total += parameter.numel() * share_of_token(name, parameter, model.config)
    return total


def share_of_token(name: str, parameter: nn.Parameter, config: Any) -> float:
    """Return the part of a parameter that multiplies a token: of experts those that it is given to; 0 of a vector."""
    if parameter.ndim < 2 or name.endswith("bias"):
        return 0.0
    if parameter.ndim == 3 and "experts" in name:
        chosen = getattr(config, "num_experts_per_tok", 1)  # in some configs by layer
        return (sum(chosen) / len(chosen) if isinstance(chosen, list) else chosen) / len(parameter)
    return 1.0


def _attention(config: Any, length: int) -> float:
    """Return the operations of scores and mixtures for each token in a forward pass; linear attention has none."""
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    key = getattr(config, "qk_nope_head_dim", 0) + getattr(config, "qk_rope_head_dim", 0) or size
    value = getattr(config, "v_head_dim", None) or size
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None) or length
    reach = {"full_attention": length, "sliding_attention": min(length, window)}
    return sum(2 * heads * (key + value) * reach.get(kind, 0) for kind in kinds)


ADD = 3
"""a + b out of place."""
SIZED_SUM = 3 + 3 + ADD
"""A sublayer's part in a sum of outputs of other sizes (`block_sum`): the output and the sum in, the sum out. Backward:
the sum's gradient and the output in, the output's gradient out, which is added to that of the plain sum."""
SCALED_SUM = 4 + 3
"""A sublayer's part in a sum that is a source by a factor (`count_power`): the output and the sum in, the sum and the
source out. Backward: the source's and the sum's gradients in, the output's out. A learned factor (`block_scale`) has
one more, the sum in. An output that begins a sum is that sum: forward 2, backward 2."""
STANDARD = 8
"""A sublayer of the standard residual, addition and norm fused: h, f -> h, x. Backward: dx, h and the stream's gradient
-> that gradient."""


def read_sealed(n: float, reads: int) -> float:
    """Phase 1: sources in, an output for each read out."""
    return n + reads


def read_sealed_backward(n: float, reads: int, carried: float) -> float:
    """Return the vectors moved: the sources, outputs' gradients and what later reads left for the sources in; the
    sources' gradients out."""
    return n + reads + carried + n


def merge(opens: int, *, added: bool, sealed: bool = True, norm: bool = True, kept: bool = True) -> float:
    """Open sources, what is added to the last of them and the phase-1 output in; the sum, h and x out.

    h goes to memory only if a backward needs it (`kept`) and it is not the phase-1 output itself; in fp32 if no norm
    follows, when x is h rounded.
    """
    h = (1 if norm else 2) if kept and opens else 0
    return opens + added + sealed + added + 1 + h


def merge_backward(opens: int, *, carried: int, sealed: bool = True) -> float:
    """Return the vectors moved: the gradient, h, the open sources and their carried gradients in; gradients of these
    and of the output out."""
    return 2 + opens + carried + opens + sealed


def group(n: float, opens: Sequence[int], *, sums: int) -> float:
    """Return the vectors of a group of reads, forward and backward, with their pre-norms and the sublayers' additions.

    Args:
        n: sealed sources of the group.
        opens: open sources of each of its reads, the first of which has none.
        sums: how many open sources outputs are added to, in turn: 1 of Block, 2 with `summaries=split`; 0 where each
            output is a source of its own (Full).
    """
    reads = len(opens)
    added = [0 < sums < i for i in range(reads)]
    forward = read_sealed(n, reads) + sum(merge(open_, added=add) for open_, add in zip(opens, added, strict=True))
    backward = read_sealed_backward(n, reads, n) + sum(merge_backward(open_, carried=open_) for open_ in opens)
    return forward + backward + ADD * (0 < sums < reads)


def connect(streams: int) -> int:
    """Return the vectors of a sublayer of parallel streams, forward and backward, with its pre-norm and addition.

    Streams before the write and the output in, streams after it and x out. Backward: both, and the gradients of x and
    of the streams after the write in; those of the streams before it and of the output out.
    """
    return 2 * streams + 2 + 4 * streams + 3


def step_vectors(residual: Residual) -> float | None:
    """Return the vectors a token that all sublayers of a network move in a step; None for a mechanism that is not
    counted: another one than standard, Block, Full or parallel streams, or settings that no kernel has."""
    if type(residual) is residual_class("standard"):
        return float(STANDARD * residual.num_sublayers)
    if isinstance(residual, ParallelStreams):
        return float(connect(residual.num_streams) * residual.num_sublayers) if residual.has_kernels else None
    if isinstance(residual, Compose):
        standard = sum(part.stop - part.first for part in residual.laid if part.rule is None)
        moved = [step_vectors(part.rule) for part in residual.laid if part.rule is not None]
        return None if None in moved else STANDARD * standard + sum(filter(None, moved))
    if not isinstance(residual, DepthAttention) or type(residual) not in (Block, Full):
        return None
    if residual.special is not None or residual.window is not None:
        return None
    kinds, total = 0, 0.0
    if isinstance(residual, Block) and residual.scales:
        begun = sum(min(size, residual.kinds) for size in residual.block_sizes)
        total = (SCALED_SUM + (residual.scale is not None)) * (residual.num_sublayers - begun) + 4.0 * begun
    elif isinstance(residual, Block):
        kinds = residual.kinds
        total = SIZED_SUM * residual.num_sublayers * (residual.altered is not None)
    for start, stop in pairwise(residual.bounds):
        opens = [len(residual.opens(index)) for index in range(start, stop)]
        total += group(len(residual.sealed(start)), opens, sums=kinds)
    return total
