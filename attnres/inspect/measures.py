"""Numbers that a trace's arrays boil down to, each with its formula.

M is the depth mixing matrix, h_l = sum_i M[l, i] v_i (arXiv 2603.15031, section on structured matrices): rows are reads
l = 0 .. L (L the output's), columns outputs, 0 the embedding and i what sublayer i-1 wrote. It exists for every
residual that is linear in its outputs, so that its measures compare standard, Hyper-Connections, DenseFormer and depth
attention with one another.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

KINDS_OF_READS = ("attention", "mlp", "output")
"""What a read feeds."""


def columns(sources: Sequence[Sequence[str]]) -> list[str]:
    """Every source's name once, in order of depth; what a read sees of unfinished work ("partial", "stream", "null")
    comes last.

    >>> columns([["embedding"], ["embedding", "partial"], ["embedding", "block 1"]])
    ['embedding', 'block 1', 'partial']
    """
    names = list(dict.fromkeys(name for row in sources for name in row))
    passing = [name for name in ("partial", "stream", "null") if name in names]
    return [name for name in names if name not in passing] + passing


def heatmaps(routing: Mapping[str, Any]) -> dict[str, tuple[list[str], list[str], np.ndarray]]:
    """Mean weights apart for reads before attention, before the MLP, and of the output.

    Rows of a trace have as many entries as the read has sources; here every weight stands in its source's column.

    Args:
        routing: `reads` (names), `sources` and `weights` (rows), as `Trace.routing`.

    Returns:
        For each of `KINDS_OF_READS` that there is: names of the rows, names of the columns (the same for all), and the
        weights (rows, columns), NaN where a read does not have that source.
    """
    names = columns(routing["sources"])
    place = {name: i for i, name in enumerate(names)}
    result = {}
    for kind in KINDS_OF_READS:
        chosen = [i for i, read in enumerate(routing["reads"]) if read.split()[0] == kind]
        table = np.full((len(chosen), len(names)), np.nan)
        for row, i in enumerate(chosen):
            for source, weight in zip(routing["sources"][i], routing["weights"][i], strict=True):
                table[row, place[source]] = weight
        if chosen:
            result[kind] = ([routing["reads"][i] for i in chosen], names, table)
    return result


def normalised(mixing: np.ndarray) -> np.ndarray:
    """|M[l, i]| / sum_j |M[l, j]|: the share of each output in a read by its coefficient; rows sum to one."""
    size = np.abs(mixing)
    total = size.sum(1, keepdims=True)
    return np.divide(size, total, out=np.zeros_like(size), where=total > 0)


def depth_distance(mixing: np.ndarray) -> np.ndarray:
    """Effective depth distance of each read, in sublayers: sum_i p[l, i] (l - i) with p = `normalised(M)`.

    0 is a read of the newest output alone, l one of the embedding alone; a plain residual has l / 2.
    """
    places = np.arange(len(mixing))
    return (normalised(mixing) * (places[:, None] - places[None, :])).sum(1)


def embedding_persistence(mixing: np.ndarray) -> np.ndarray:
    """The embedding's share in each read: `normalised(M)[:, 0]`; a plain residual has 1 / (l + 1)."""
    return normalised(mixing)[:, 0]


def entropy(weights: np.ndarray) -> np.ndarray:
    """-sum_i p_i ln p_i in nats over the last axis, p = |weights| over their sum.

    The entropy of mean weights is larger than the mean entropy of tokens, which `Trace.entropy` has: it counts that
    tokens differ, too.
    """
    size = np.abs(weights)
    p = size / size.sum(-1, keepdims=True)
    return -np.where(p > 0, p * np.log(np.where(p > 0, p, 1.0)), 0.0).sum(-1)


def effective_number(nats: Sequence[float] | np.ndarray) -> np.ndarray:
    """exp(entropy): over how many sources a read would spread evenly to have it (perplexity of the weights)."""
    return np.exp(np.asarray(nats, dtype=float))


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
        lines: of metrics.jsonl, as `attnres.training.metrics.read` gives them.

    Returns:
        `steps`, and every quantity that all of the `depth` lines have as a row of numbers, one for each sublayer or
        read: `output_rms`, `input_rms`, `grad_rms`, and where the run has them `entropy`, `sharpness`, `gate`,
        `recency_bias`, `alpha`. Coefficients that are a row or a matrix for each read are not curves and left out.
    """
    found = {line["step"]: line for line in lines if line["kind"] == "depth"}  # after a resume the later one counts
    if not found:
        return None
    steps = sorted(found)
    names = [key for key, value in found[steps[0]].items() if isinstance(value, list) and _is_row(value)]
    rows = {name: [found[step][name] for step in steps] for name in names if all(name in found[s] for s in steps)}
    return {"steps": steps, **rows}
