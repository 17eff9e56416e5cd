"""Count the cost of a training step: floating-point operations, the fraction of a device's peak (MFU), and bytes that
reads move.

Operations are counted as in PaLM (Chowdhery et al., arXiv 2204.02311, appendix B): for each token, two for each weight
that multiplies it, and 4 H Q T a layer for attention's scores and mixtures (H heads of size Q, T tokens; the causal
mask leaves none out); twice that again for the gradients. Recomputation (activation checkpointing), reads of a residual
and the recurrence of linear attention do not count: MFU is the rate of the plain model's operations, and falls by the
time that these take.

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
"""Part of a device's name -> dense operations a second in bf16 (sums in fp32) and in fp32 (without TF32), from NVIDIA's
data sheets. The first match counts."""


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Return the peak operations a second of a device in "bf16" or "fp32"; None for a device that is not listed."""
    # the data sheets are for CUDA GPUs, which round fp32 to TF32 if asked to
    if device.type != "cuda" or (dtype == "fp32" and torch.backends.cuda.matmul.allow_tf32):
        return None
    words = torch.cuda.get_device_name(device).replace("-", " ").split()
    for name, (bf16, fp32) in PEAKS.items():
        if set(name.split()) <= set(words):
            return bf16 if dtype == "bf16" else fp32
    return None


def forward_flops(model: Any, length: int) -> float:
    """Return the operations of a forward pass for each token of sequences of `length` tokens."""
    return 2 * _multiplying(model) + _attention(model.config, length)


def step_flops(model: Any, length: int) -> float:
    """Return the operations of a forward and a backward pass for each token; a frozen weight needs no gradient."""
    gradients = 2 * (_multiplying(model) + _multiplying(model, trained=True)) + 2 * _attention(model.config, length)
    return forward_flops(model, length) + gradients


def _multiplying(model: Any, *, trained: bool = False) -> float:
    """Return the number of weights (or of trained weights) that multiply a token; of experts the fraction that a token
    uses."""
    residual = getattr(model, "residual", None)
    of_residual = {id(p) for p in residual.parameters()} if isinstance(residual, nn.Module) else set()
    head = {id(p) for p in model.get_output_embeddings().parameters()}
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()} - head
    total = 0.0
    for name, parameter in model.named_parameters():
        if id(parameter) not in of_residual | tables and (parameter.requires_grad or not trained):
            total += parameter.numel() * share_of_token(name, parameter, model.config)
    return total


def share_of_token(name: str, parameter: nn.Parameter, config: Any) -> float:
    """Return the fraction of a parameter that multiplies a token: for experts the fraction of experts used; 0 for a
    vector."""
    if parameter.ndim < 2 or name.endswith("bias"):
        return 0.0
    if parameter.ndim == 3 and "experts" in name:
        per_token = getattr(config, "num_experts_per_tok", 1)  # some configs list it by layer
        return (sum(per_token) / len(per_token) if isinstance(per_token, list) else per_token) / len(parameter)
    return 1.0


def _attention(config: Any, length: int) -> float:
    """Return the operations of attention scores and mixtures for each token in a forward pass; linear attention has
    none."""
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    key = getattr(config, "qk_nope_head_dim", 0) + getattr(config, "qk_rope_head_dim", 0) or size
    value = getattr(config, "v_head_dim", None) or size
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None) or length
    reach = {"full_attention": length, "sliding_attention": min(length, window)}
    return sum(2 * heads * (key + value) * reach.get(kind, 0) for kind in kinds)


ADD = 3
"""Vectors moved by a + b into new memory."""
SIZED_SUM = 3 + 3 + ADD
"""Vectors moved by a sublayer's part in a weighted sum of outputs (`block_sum`): reads the output and the sum, writes
the sum. Backward: reads the sum's gradient and the output, writes the output's gradient, and adds it to that of the
plain sum."""
SCALED_SUM = 4 + 3
"""Vectors moved by a sublayer's part in a sum that is a source times a factor (`count_power`): reads the output and the
sum, writes the sum and the source. Backward: reads the source's and the sum's gradients, writes the output's. A learned
factor (`block_scale`) moves one more, reading the sum. An output that begins a sum is that sum: forward 2, backward
2."""
STANDARD = 8
"""Vectors moved by a sublayer of the standard residual, with addition and norm fused: h, f -> h, x. Backward: reads dx,
h and the stream's gradient, writes that gradient."""


def read_sealed(n: float, reads: int) -> float:
    """Return the vectors moved by phase 1: reads the sources, writes an output for each read."""
    return n + reads


def read_sealed_backward(n: float, reads: int, carried: float) -> float:
    """Return the vectors moved by phase 1's backward: reads the sources, the outputs' gradients and the sources'
    gradients from later reads; writes the sources' gradients."""
    return n + reads + carried + n


def merge(opens: int, *, added: bool, sealed: bool = True, norm: bool = True, kept: bool = True) -> float:
    """Return the vectors moved by phase 2: reads the open sources, the output added to the last of them and phase 1's
    output; writes the sum, h and x.

    h is written only if a backward needs it (`kept`) and it is not the phase-1 output itself. It is fp32 if no norm
    follows; then x is h rounded.
    """
    h = (1 if norm else 2) if kept and opens else 0
    return opens + added + sealed + added + 1 + h


def merge_backward(opens: int, *, carried: int, sealed: bool = True) -> float:
    """Return the vectors moved by phase 2's backward: reads the gradient, h, the open sources and their gradients from
    later reads; writes gradients of the open sources and of phase 1's output."""
    return 2 + opens + carried + opens + sealed


def group(n: float, opens: Sequence[int], *, sums: int) -> float:
    """Return the vectors moved by a group of reads, forward and backward, with their pre-norms and the sublayers'
    additions.

    Args:
        n: number of sealed sources of the group.
        opens: number of open sources of each read of the group; the first read has none.
        sums: number of open sums that outputs are added to, alternating: 1 for Block, 2 with `summaries=split`; 0 if
            each output is a source (Full).
    """
    reads = len(opens)
    added = [0 < sums < i for i in range(reads)]
    forward = read_sealed(n, reads) + sum(merge(open_, added=add) for open_, add in zip(opens, added, strict=True))
    backward = read_sealed_backward(n, reads, n) + sum(merge_backward(open_, carried=open_) for open_ in opens)
    return forward + backward + ADD * (0 < sums < reads)


def connect(streams: int) -> int:
    """Return the vectors moved by a sublayer of parallel streams, forward and backward, with its pre-norm and addition.

    Forward: reads the old streams and the output, writes the new streams and x. Backward: reads all of these inputs and
    the gradients of x and of the new streams, writes those of the old streams and of the output.
    """
    return 2 * streams + 2 + 4 * streams + 3


def step_vectors(residual: Residual) -> float | None:
    """Return the vectors a token that all sublayers of a network move in a step; None for mechanisms other than
    standard, Block, Full and parallel streams, and for settings without a kernel."""
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
