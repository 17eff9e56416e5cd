"""Depth reads as functions: a plain reference, and the two-phase block schedule with its own backward."""

from attnres.ops.dispatch import Plan, explain, in_two_phases, stored_dtype
from attnres.ops.norms import Norm, inverse_rms
from attnres.ops.one_read import depth_read
from attnres.ops.plain import plain_torch
from attnres.ops.precision import compute_dtype, full_precision, rounded_sum
from attnres.ops.reference import depth_read_reference, scaled_query
from attnres.ops.two_phase import Merged, SealedRead, SealedReads, apply_norm, merge, read_sealed, sealed_sum

__all__ = [
    "Merged",
    "Norm",
    "Plan",
    "SealedRead",
    "SealedReads",
    "apply_norm",
    "compute_dtype",
    "depth_read",
    "depth_read_reference",
    "explain",
    "full_precision",
    "in_two_phases",
    "inverse_rms",
    "merge",
    "plain_torch",
    "read_sealed",
    "rounded_sum",
    "scaled_query",
    "sealed_sum",
    "stored_dtype",
]
