"""What makes a training step fast on the device it runs on, and changes nothing else."""

import ctypes
import functools
import platform
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EAGER_UP_TO = 512
"""Longest sequence for which a CPU multiplies whole score matrices; for longer ones fused attention is faster."""


def tune(model: "PreTrainedModel", device: torch.device, seq_len: int) -> None:
    """Choose the attention implementation and, on a CPU, let freed memory be reused; for every residual alike.

    Plain matrix products are faster than PyTorch's fused attention on a CPU for short sequences in bf16, and no slower
    in fp32 (`benchmarks/results/attention_cpu.json`); on other devices the fused one is taken. A family whose scores
    PyTorch's fused attention cannot make (Gemma 2, GPT-OSS) keeps whole matrices everywhere.
    """
    fused = model._supports_sdpa and not (device.type == "cpu" and seq_len <= EAGER_UP_TO)
    model.set_attn_implementation("sdpa" if fused else "eager")
    if device.type == "cpu":
        keep_freed_memory()


@functools.cache
def keep_freed_memory() -> None:
    """Let the C library keep what a step frees for the next one, instead of giving it back to the system.

    Otherwise every activation of a few MB is mapped, page by page, anew in each step. glibc only; elsewhere nothing.
    """
    if platform.system() != "Linux":
        return
    try:
        libc = ctypes.CDLL("libc.so.6")
        trim_threshold, mmap_threshold = -1, -3
        sizes = 1 << 30, 32 << 20  # older ones refuse more than 32 MiB
        if any(libc.mallopt(mmap_threshold, size) for size in sizes):
            libc.mallopt(trim_threshold, (1 << 31) - 1)
    except (OSError, AttributeError):
        return
