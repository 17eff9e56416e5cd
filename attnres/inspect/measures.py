"""Numbers that a trace's arrays boil down to, each with its formula.

M is the depth mixing matrix, h_l = sum_i M[l, i] v_i (arXiv 2603.15031, section on structured matrices): rows are reads
in order, the output's last, columns outputs, 0 the embedding and i what sublayer i-1 wrote. It exists for every
residual that is linear in its outputs, so that its measures compare standard, Hyper-Connections, DenseFormer and depth
attention with one another.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def normalised(mixing: np.ndarray) -> np.ndarray:
    """|M[l, i]| / sum_j |M[l, j]|: the share of each output in a read by its coefficient; rows sum to one."""
    size = np.abs(mixing)
    total = size.sum(1, keepdims=True)
    return np.divide(size, total, out=np.zeros_like(size), where=total > 0)


def depth_distance(mixing: np.ndarray, written: Sequence[int] | None = None) -> np.ndarray:
    """Effective depth distance of each read, in sublayers: sum_i p[l, i] (n_l - i) with p = `normalised(M)`.

    0 is a read of the newest output alone, n_l one of the embedding alone; a plain residual has n_l / 2.

    Args:
        written: n_l, how many sublayers have written before each read (`attnres.residuals.depths`); None is l.
    """
    places = np.arange(len(mixing)) if written is None else np.asarray(written)
    return (normalised(mixing) * (places[:, None] - np.arange(mixing.shape[1]))).sum(1)


def embedding_persistence(mixing: np.ndarray) -> np.ndarray:
    """The embedding's share in each read: `normalised(M)[:, 0]`; a plain residual has 1 / (n_l + 1)."""
    return normalised(mixing)[:, 0]


def source_spike(source_rms: Sequence[Sequence[float]]) -> np.ndarray:
    """max_i rms(v_i) / median_i rms(v_i) of each read's sources; NaN for a read with fewer than three.

    Keys are normed and values are not, so one large source can fill a read that hardly weighs it. Full depth attention
    is known for such a source (the nanoGPT study, github.com/aupadhyay/attnres-exp).
    """
    rows = [np.asarray(row, dtype=float) for row in source_rms]
    return np.array([row.max() / np.median(row) if len(row) > 2 else np.nan for row in rows])


def _is_row(values: list[Any]) -> bool:
    return not any(isinstance(value, list) for value in values)


def dynamics(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What a training run recorded by depth, over its steps; None where it recorded nothing.

    Args:
        lines: of metrics.jsonl, as `attnres.training.records.read_metrics` gives them.

    Returns:
        `steps`, and every quantity that all of the `depth` lines have as a row of numbers, one for each sublayer or
        read: `output_rms`, `input_rms`, `grad_rms`, and where the run has them `entropy`, `sharpness`, `gate`,
        `recency_bias`, `alpha`. Coefficients that are a row or a matrix for each read are not curves and left out.
    """
    by_step = {line["step"]: line for line in lines if line["kind"] == "depth"}  # after a resume the later one counts
    if not by_step:
        return None
    steps = sorted(by_step)
    names = [key for key, value in by_step[steps[0]].items() if isinstance(value, list) and _is_row(value)]
    rows = {name: [by_step[step][name] for step in steps] for name in names if all(name in by_step[s] for s in steps)}
    return {"steps": steps, **rows}
