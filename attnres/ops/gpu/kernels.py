"""The Triton backend, for fp32, bf16 and fp16 vectors, with fp32 arithmetic."""

from attnres.ops.gpu.merge import merge, merge_backward, mix
from attnres.ops.gpu.sealed import read_sealed, read_sealed_backward
from attnres.ops.gpu.streams import connect, connect_backward

__all__ = ["connect", "connect_backward", "merge", "merge_backward", "mix", "read_sealed", "read_sealed_backward"]
