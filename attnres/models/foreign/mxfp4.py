"""Weights in MXFP4 (OCP Microscaling Formats 1.0) as compressed-tensors stores them, dequantised when they are read."""

import logging
from typing import Any

import torch
from torch import Tensor

from attnres.errors import UserError
from attnres.models.foreign.format import Stored

_log = logging.getLogger("attnres")

_FORMAT = "mxfp4-pack-quantized"
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of four bits by the lower three; the highest is the sign."""


def is_format_of(quantisation: dict[str, Any] | None) -> bool:
    """Return whether a config's `quantization_config` says MXFP4; False for None. Raises UserError for another
    method."""
    if not quantisation:
        return False
    groups = (quantisation.get("config_groups") or {}).values()
    formats = {part["format"] for part in (quantisation, *groups) if part.get("format")}
    if formats != {_FORMAT}:
        method = ", ".join(str(part) for part in (quantisation.get("quant_method"), *sorted(formats)) if part)
        raise UserError(
            f"the weights are quantised by '{method}': expected '{_FORMAT}' of compressed-tensors or none; save a "
            "dequantised copy first"
        )
    return True


def dequantised(tensors: dict[str, Stored], source: str) -> dict[str, Stored]:
    """Return the tensors with an fp32 one for each matrix in MXFP4, `weight_packed` and `weight_scale`."""
    numbers = dict(tensors)
    for name, packed in tensors.items():
        if not name.endswith(".weight_packed"):
            continue
        matrix = name.removesuffix("_packed")
        scale = numbers.pop(f"{matrix}_scale", None)
        if scale is None:
            raise UserError(f"{source} lacks '{matrix}_scale': copy it again")
        rows, size = packed.shape if len(packed.shape) == 2 else (0, 0)
        if packed.dtype != torch.uint8 or scale.dtype != torch.uint8 or scale.shape != (rows, size / 16):
            raise UserError(
                f"'{name}' of {source} has shape {packed.shape}, and its scale {scale.shape}: expected bytes, a scale "
                "for 32 values of four bits"
            )
        if matrix in tensors:
            raise UserError(f"{source} has '{matrix}' twice, quantised and not: keep one")
        del numbers[name]
        numbers[matrix] = _of_pair(packed, scale)
    if len(numbers) < len(tensors):
        _log.warning("%s has weights in MXFP4, which are dequantised, and are written so", source)
    return numbers


def _of_pair(packed: Stored, scale: Stored) -> Stored:
    return Stored(lambda: unpacked(packed[...], scale[...]), (packed.shape[0], 2 * packed.shape[1]), torch.float32)


def unpacked(packed: Tensor, scale: Tensor) -> Tensor:
    """Return a matrix (rows, columns) in fp32 of one in MXFP4.

    Args:
        packed: bytes (rows, columns / 2) of two values in E2M1, the first in the lower half.
        scale: bytes (rows, columns / 32), for 32 values a power of two in E8M0.
    """
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], 1)  # of each byte
    powers = scale.view(torch.float8_e8m0fnu).float()
    return (pairs[packed.int()].view(*scale.shape, 32) * powers.unsqueeze(2)).flatten(1)
