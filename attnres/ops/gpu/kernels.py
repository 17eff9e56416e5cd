"""The Triton backend: the five functions of ops/eager.py in fp32 arithmetic on fp32, bf16 and fp16 vectors."""

from attnres.ops.gpu.merge import merge, merge_backward, mix
from attnres.ops.gpu.sealed import read_sealed, read_sealed_backward

__all__ = ["merge", "merge_backward", "mix", "read_sealed", "read_sealed_backward"]
