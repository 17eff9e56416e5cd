"""The learned side of depth reads: how sharp pseudo-queries are, how alike, and what gates hold them back."""

import math
from typing import Any

import numpy as np
import torch

from attnres.residuals import BoundaryNormed, DenseFormer, HyperConnections, Residual
from attnres.residuals.gates import Gates


def directions(residual: Residual) -> np.ndarray:
    """(L+1, d): each read's pseudo-query times its key gain, w_l * g_l, in fp64; NaN where a read has none, or one of
    zero length: never trained (a read of one source) or not yet."""
    rows = np.full((residual.num_sublayers + 1, residual.width), np.nan)
    for index in range(len(rows)):
        query = residual.direction(index)
        if query is not None and bool(query.any()):
            rows[index] = query.detach().double().cpu().numpy()
    return rows


def sharpness(residual: Residual) -> list[float | None] | None:
    """|w_l * g_l| sqrt(d) / temperature of each read: the largest logit that it can give.

        |w . (g * v / rms(v))| <= |w * g| |v / rms(v)| = |w * g| sqrt(d)    (Cauchy-Schwarz)

    The logits of two sources can then differ by twice that. 0 is a uniform read; None is a read without a query, and
    instead of the list a residual without queries. `boundary_normed` divides its logits by sqrt(d), so there it is
    |w * g|.
    """
    if not residual.weighs:
        return None
    largest = 1.0 if isinstance(residual, BoundaryNormed) else math.sqrt(residual.width)
    gates = getattr(residual, "gates", None)
    if gates is not None:
        largest /= gates.read_temperature
    queries = [residual.direction(index) for index in range(residual.num_sublayers + 1)]
    return [None if query is None else float(query.detach().double().norm()) * largest for query in queries]


def query_cosine(residual: Residual) -> list[list[float | None]] | None:
    """(L+1, L+1): cosine of each two reads' w * g; None where one has no query or one of zero length, and instead of
    the matrix where fewer than two have one."""
    rows = directions(residual)
    lengths = np.linalg.norm(rows, axis=1)
    if np.isfinite(lengths).sum() < 2:
        return None
    unit = rows / lengths[:, None]
    return [[None if math.isnan(value) else float(np.clip(value, -1, 1)) for value in row] for row in unit @ unit.T]


def query_pca(residual: Residual) -> dict[str, Any] | None:
    """The reads' w * g, less their mean, on their first two principal axes (numpy's SVD).

    Returns:
        `points`: [x, y] of each read, [None, None] where it has no query; `explained`: the two axes' shares of the
        variance. None where fewer than three reads have a query. An axis' sign is chosen so that its largest point is
        positive.
    """
    rows = directions(residual)
    there = np.isfinite(rows[:, 0])
    if there.sum() < 3:
        return None
    centred = rows[there] - rows[there].mean(0)
    left, scale, _ = np.linalg.svd(centred, full_matrices=False)
    places = left[:, :2] * scale[:2]
    places = np.pad(places, ((0, 0), (0, 2 - places.shape[1])))
    places *= np.where(np.take_along_axis(places, np.abs(places).argmax(0)[None], 0) < 0, -1.0, 1.0)
    variance = np.pad(scale**2, (0, 2))
    if not variance.sum():  # all queries are equal: there are no axes
        return None
    points: list[list[float | None]] = [[None, None] for _ in rows]
    for index, place in zip(np.flatnonzero(there), places, strict=True):
        points[index] = [float(place[0]), float(place[1])]
    return {"points": points, "explained": (variance[:2] / variance.sum()).tolist()}


@torch.no_grad()
def learned_mixing(residual: Residual) -> dict[str, Any] | None:
    """What a residual has learned besides queries, by name; None where that is nothing.

    Returns:
        Of depth attention with gates: `recency_bias` (reads,) on the logit of the last source; `gate` (reads,), the
        share of the read by its bias alone, sigmoid(c), its mean over channels if it is a vector; `alpha` (reads,).
        Of DenseFormer: `mix`, for each layer i its i + 2 coefficients of the embedding and the layers so far. Of
        Hyper-Connections: `read` (L, n), how much of each stream a sublayer reads, and `write` (L, n), how much of its
        output each stream gets, both without their dynamic part.
    """
    gates = getattr(residual, "gates", None)
    found: dict[str, torch.Tensor] = {}
    if isinstance(gates, Gates):
        if gates.bias is not None:
            found["recency_bias"] = gates.bias
        if gates.gate is not None:
            share = gates.gate.sigmoid()
            found["gate"] = share.mean(1) if share.dim() == 2 else share
        if gates.alpha is not None:
            found["alpha"] = gates.alpha
    elif isinstance(residual, DenseFormer):
        return {"mix": [row[: i + 2].tolist() for i, row in enumerate(residual.mix.float().cpu())]}
    elif isinstance(residual, HyperConnections):
        found = {"read": residual.static_alpha[..., 0], "write": residual.static_beta}
    return {name: value.float().cpu().tolist() for name, value in found.items()} or None
