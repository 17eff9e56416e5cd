"""Inspections made of invented numbers, for networks of any depth."""

from typing import Any

import numpy as np

from attnres.inspect.inspection import Inspection
from attnres.residuals import depths, make_residual

TOKENS = ["def", " ", "f", "(x):", "\n", "    ", "return", " $x$", "\U0001f600", "\n", "\u4e2d"]


def names(residual: str, layers: int, per_block: int = 3) -> list[list[str]]:
    """Sources of every read, as `Trace.sources` has them."""
    sublayers = [f"{kind} {layer}" for layer in range(layers) for kind in ("attention", "mlp")]
    if residual != "block":
        return [["embedding", *sublayers[:index]] for index in range(len(sublayers) + 1)]
    rows = []
    for index in range(len(sublayers) + 1):
        sealed, pending = divmod(index, per_block)
        if index == len(sublayers) and pending:
            sealed, pending = sealed + 1, 0
        blocks = [f"block {n}" for n in range(1, sealed + 1)]
        rows.append(["embedding", *blocks, *(["partial"] if pending else [])])
    return rows


def inspection(residual: str = "block", layers: int = 4, **changes: Any) -> Inspection:
    """One whose every number is different, so that a cell in the wrong place is seen."""
    count = 2 * layers
    random = np.random.default_rng(3)
    sources = names(residual, layers)
    reads = [f"{kind} {layer}" for layer in range(layers) for kind in ("attention", "mlp")] + ["output"]

    def weights() -> list[list[float]]:
        if residual == "standard":
            return [[1.0] * len(row) for row in sources]
        return [random.dirichlet(np.ones(len(row))).tolist() for row in sources]

    def contributions() -> list[list[float]]:
        rows = [random.normal(0.5, 0.5, len(row)) for row in sources]
        return [(row / row.sum()).tolist() if abs(row.sum()) > 0.1 else [1.0] + [0.0] * (len(row) - 1) for row in rows]

    softmax = residual != "standard"
    kinds = ["statement start", "identifier", "literal"]
    labels = {"names": kinds, "tokens": [40, 50, 60], "documents": [4, 4, 4], "weights": [weights() for _ in kinds]}
    labels["error"] = labels["contribution_error"] = [[[0.01] * len(row) for row in sources] for _ in kinds]
    labels["contribution"] = [contributions() for _ in kinds]
    mixing = np.tril(random.random((count + 1, count + 1)) + 0.01)
    parts = np.tril(random.random((count + 1, count + 1)) + 0.01)
    cosine = np.clip(random.normal(0, 0.4, (count + 1, count + 1)), -1, 1)
    cosine[0] = np.nan
    cosine[:, 0] = np.nan
    per_token = [[row for _ in TOKENS] for row in weights()]
    if softmax:
        per_token = [[random.dirichlet(np.ones(len(row))).tolist() for _ in TOKENS] for row in sources]
    values: dict[str, Any] = {
        "model": {
            "name": f"{residual}-$mall",
            "residual": residual,
            "settings": {},
            "num_sublayers": count,
            "width": 16,
            "parameters": 1000,
        },
        "data": {"source": "text", "documents": 4, "windows": 4, "tokens": 150, "context": 64, "kind": "code"},
        "reads": reads,
        "routing": {"reads": reads, "sources": sources, "weights": weights(), "contribution": contributions()},
        "entropy": {
            "nats": random.random(count + 1).tolist(),
            "effective": (1 + random.random(count + 1)).tolist(),
            "most": [len(row) for row in sources],
        },
        "mixing": mixing.tolist(),
        "mixing_contribution": (parts / parts.sum(1, keepdims=True)).tolist(),
        "distance": random.random(count + 1).tolist(),
        "persistence": random.random(count + 1).tolist(),
        "sharpness": [None, *random.random(count).tolist()] if softmax else None,
        "query_cosine": cosine.tolist() if softmax else None,
        "query_pca": {
            "points": [[None, None], *random.normal(size=(count, 2)).tolist()],
            "explained": [0.5, 0.2],
        }
        if softmax
        else None,
        "learned": None,
        "output_rms": (0.1 + random.random(count)).tolist(),
        "input_rms": (0.1 + random.random(count + 1)).tolist(),
        "source_rms": [(0.1 + 9 * random.random(len(row))).tolist() if softmax else [] for row in sources],
        "source_cosine": [],
        "key_cosine": np.eye(len(sources[-1])).tolist() if softmax else [],
        "kinds": labels,
        "example": {
            "text": "".join(TOKENS),
            "tokens": TOKENS,
            "ids": list(range(len(TOKENS))),
            "kinds": [],
            "losses": [1.0] * len(TOKENS),
            "weights": per_token,
            "contribution": [list(rows) for rows in zip(*(contributions() for _ in TOKENS))],
        },
    }
    return Inspection(**(values | changes))


def of_several_reads(residual: str, layers: int) -> Inspection:
    """One of a mechanism with several reads a sublayer, as its layout names them."""
    random, layout = np.random.default_rng(5), make_residual(residual, 2 * layers, 16).layout()
    weights = [random.dirichlet(np.ones(len(read.sources))).tolist() for read in layout]
    mixing = random.random((len(layout), 2 * layers + 1)) + 0.01
    for row, written in zip(mixing, depths(layout)):
        row[written + 1 :] = 0.0
    names = [read.name for read in layout]
    return Inspection(
        model={"name": residual, "residual": residual},
        data={"tokens": 100},
        reads=names,
        routing={
            "reads": names,
            "sources": [[source.name for source in read.sources] for read in layout],
            "layout": [read.to_json() for read in layout],
            "weights": weights,
        },
        mixing=mixing.tolist(),
        distance=random.random(len(layout)).tolist(),
        input_rms=(random.random(len(layout)) + 0.5).tolist(),
        output_rms=(random.random(2 * layers) + 0.5).tolist(),
    )
