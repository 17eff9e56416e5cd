"""The learned side of depth reads: how sharp pseudo-queries are, how alike, and what gates hold them back."""

import math
from typing import Any

import numpy as np

from attnres.residuals import Residual


def directions(residual: Residual) -> np.ndarray:
    """Return (R, d): pseudo-query times key gain, w_l * g_l, of each of the R reads in fp64; NaN where a read has none,
    or one of zero length: never trained (a read of one source) or not yet."""
    rows = np.full((len(residual.layout()), residual.width), np.nan)
    for index in range(len(rows)):
        query = residual.direction(index)
        if query is not None and bool(query.any()):
            rows[index] = query.detach().double().cpu().numpy()
    return rows


def sharpness(residual: Residual) -> list[float | None] | None:
    """Return |w_l * g_l| sqrt(d) / temperature of each read: the largest logit that it can give.

        |w . (g * v / rms(v))| <= |w * g| |v / rms(v)| = |w * g| sqrt(d)    (Cauchy-Schwarz)

    The logits of two sources can then differ by twice that. 0 is a uniform read; None is a read without a query, and
    instead of the list a residual without queries. `boundary_normed` divides its logits by sqrt(d), so there it is
    |w * g|.
    """
    if not residual.traits.has_query:
        return None
    return [residual.sharpness(index) for index in range(len(residual.layout()))]


def query_cosine(residual: Residual) -> list[list[float | None]] | None:
    """Return (R, R): cosine of each two reads' w * g; None where one has no query or one of zero length, and instead of
    the matrix where fewer than two have one."""
    rows = directions(residual)
    lengths = np.linalg.norm(rows, axis=1)
    if np.isfinite(lengths).sum() < 2:
        return None
    unit = rows / lengths[:, None]
    return [[None if math.isnan(value) else float(np.clip(value, -1, 1)) for value in row] for row in unit @ unit.T]


def query_pca(residual: Residual) -> dict[str, Any] | None:
    """Return the reads' w * g, less their mean, on their first two principal axes (numpy's SVD).

    Returns:
        `points`: [x, y] of each read, [None, None] where it has no query; `explained`: the two axes' shares of the
        variance. None where fewer than three reads have a query. An axis' sign is chosen so that its largest point is
        positive.
    """
    rows = directions(residual)
    known = np.isfinite(rows[:, 0])
    if known.sum() < 3:
        return None
    centred = rows[known] - rows[known].mean(0)
    left, scale, _ = np.linalg.svd(centred, full_matrices=False)
    places = left[:, :2] * scale[:2]
    places = np.pad(places, ((0, 0), (0, 2 - places.shape[1])))
    places *= np.where(np.take_along_axis(places, np.abs(places).argmax(0)[None], 0) < 0, -1.0, 1.0)
    variance = np.pad(scale**2, (0, 2))
    if not variance.sum():  # all queries are equal: there are no axes
        return None
    points: list[list[float | None]] = [[None, None] for _ in rows]
    for index, place in zip(np.flatnonzero(known), places, strict=True):
        points[index] = [float(place[0]), float(place[1])]
    return {"points": points, "explained": (variance[:2] / variance.sum()).tolist()}


def learned_mixing(residual: Residual) -> dict[str, Any] | None:
    """Return the learned tables of a residual other than queries (`Residual.tables`) by name, as nested lists without
    NaN; None if it has none."""
    return {name: _lists(table.values.tolist()) for name, table in residual.tables().items()} or None


def _lists(values: Any) -> Any:
    if isinstance(values, list):
        return [_lists(value) for value in values if not (isinstance(value, float) and math.isnan(value))]
    return values
