"""What a forward (and backward) pass really did: where each read came from, magnitudes and gradients by depth."""

import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from attnres.errors import UserError
from attnres.inspect import notebook
from attnres.inspect.contribution import Contributions
from attnres.ops import compute_dtype
from attnres.residuals import Residual, Source, watched_by
from attnres.stats import plain


def find_residual(model: Any) -> Residual:
    """Return the residual of a model: of this package, or a module with one of `make_residual` or `attach`.

    >>> import attnres
    >>> model = attnres.build("pico", "block", vocab_size=50)
    >>> find_residual(model).name
    'block'

    Args:
        model: a module, or a method of one.

    Raises:
        UserError: it is no module, or has none.
    """
    model = getattr(model, "__self__", model)
    if not isinstance(model, nn.Module):
        raise UserError(f"{type(model).__name__} is no module of torch: give the one whose residual is looked at")
    for module in model.modules():
        if isinstance(module, Residual):
            return module
        residual = module._modules.get("residual")
        if residual is not None and any(isinstance(part, Residual) for part in residual.modules()):
            return residual("itself")  # an adapter library may have put a wrapper around it
    raise UserError(
        f"{type(model).__name__} has no residual of attnres: build or load it with attnres.models, convert it, or give "
        "it one with make_residual or attach"
    )


class Trace(notebook.Result):
    """Running means over everything recorded; memory does not grow with the number of batches.

    Rows of `sources`, `weights`, `source_rms` and `source_cosine` belong to reads and have the read's number of
    sources. In `mixing`, outputs are numbered: 0 is the embedding, i the output of sublayer i-1.

    Args:
        residual: whose reads are recorded.
        tokens: keep the weights and contributions of every token of the last forward pass.
        labels: number of labels of tokens; the mean weights of each are kept (see `label`).
        contributions: measure what each source is of each read (`attnres.inspect.contribution`); needs the outputs of
            a pass to be held until it ends.

    Attributes:
        num_sublayers: L. width: d. residual: its name.
        layout: the R reads and what they mix, as data, the output's last (R = L+1 where each sublayer has one). reads:
            their names.
        tokens: tokens recorded so far.

    The data frame has a row a (read, source) edge: weight, contribution, size, rms, cosine with the query; none before
    the first pass.
    """

    def __init__(
        self, residual: Residual, *, tokens: bool = False, labels: int = 0, contributions: bool = True
    ) -> None:
        self.num_sublayers, self.width, self.residual = residual.num_sublayers, residual.width, residual.name
        self.layout = residual.layout()
        self.reads = [read.name for read in self.layout]
        self.tokens = 0
        reads = len(self.layout)
        self._mechanism = residual
        self._feeds_back = any(source.after is not None for read in self.layout for source in read.sources)
        self._output_squares = [0.0] * self.num_sublayers
        self._grad_squares = [0.0] * self.num_sublayers
        self._grad_tokens = [0] * self.num_sublayers
        self._input_squares = [0.0] * reads
        self._weights: list[Any] = [0.0] * reads
        self._entropy = [0.0] * reads
        self._mixing: list[Any] = [0.0] * reads
        self._source_squares: list[Any] = [0.0] * reads
        self._cosines: list[Any] = [0.0] * reads
        self._key_cosine: Any = 0.0
        mixes = contributions and all(read.sources for read in self.layout)
        self._contributions = Contributions(reads, tokens) if mixes else None
        self._rows: list[Tensor] = []
        self._lengths: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        self._keep, self._labels = tokens, labels
        self._label_ids: Tensor | None = None
        self._coming_labels: Tensor | None = None
        self._label_sums: list[Any] = [0.0] * reads
        self._label_tokens = torch.zeros(labels, dtype=torch.float64)
        self._shape = torch.Size()
        self._token_weights: dict[int, Tensor] = {}
        self._token_norms: dict[int, Tensor] = {}

    def label(self, ids: Tensor) -> None:
        """Labels (B, T) of the tokens of the coming forward pass: 0 .. labels-1; negative ones are not counted.

        Raises:
            UserError: labels outside that range, or a recording without labels.
        """
        if not self._labels or int(ids.max()) >= self._labels:
            raise UserError(
                f"label {int(ids.max())} in a recording of {self._labels} labels: pass record(model, labels=...) their "
                "number"
            )
        self._coming_labels = ids.flatten().cpu()

    # -- the observer of a residual ------------------------------------------------------------------------------
    def on_start(self, embedding: Tensor) -> None:
        if _in_backward():
            return
        self._shape = torch.Size(embedding.shape[:-1])
        self.tokens += self._shape.numel()
        self._rows.clear()
        self._lengths.clear()
        if self._contributions is not None:
            self._contributions.start(embedding)
        if self._labels:
            self._label_ids, self._coming_labels = self._coming_labels, None  # of this pass alone
            if self._label_ids is None or len(self._label_ids) != self._shape.numel():
                count = "none" if self._label_ids is None else str(len(self._label_ids))
                raise UserError(
                    f"labels for {count} of the pass's {self._shape.numel()} tokens: call trace.label(ids) before each "
                    "forward pass, with one label a token"
                )
            ids = self._label_ids[self._label_ids >= 0]
            self._label_tokens += torch.bincount(ids, minlength=self._labels)

    @torch.no_grad()
    def on_read(self, read: int, h: Tensor, weights: Tensor | None, values: Sequence[Tensor]) -> None:
        if _in_backward():
            return
        if not self.tokens:
            raise UserError("a read was made before a pass began: call `start` of the residual inside the recording")
        h = h.detach()
        self._input_squares[read] += _sum_of_squares(h)
        if self._keep:
            self._token_norms[read] = h.float().square().mean(-1).sqrt().cpu()
        if weights is None:
            return
        weights = weights.detach().float()
        self._weights[read] += weights.sum(0, dtype=torch.float64).cpu()
        shares = weights.abs() / weights.abs().sum(1, keepdim=True).clamp_min(1e-30)  # an emptied read has no entropy
        self._entropy[read] += torch.special.entr(shares).sum(dtype=torch.float64).item()
        contributions = self._contributions
        row = None
        if self._feeds_back or contributions is not None:
            row = self._mechanism.mixing_row(read, weights, self._rows)
        if self._feeds_back and row is not None:
            self._rows.append(row)
            self._mixing[read] += row.sum(0, dtype=torch.float64).cpu()
        if contributions is not None:
            contributions.read(read, h, weights, values, row)
        if values:
            self._geometry(read, values)
        if self._keep:
            self._token_weights[read] = weights.view(*self._shape, -1).cpu()
        if self._labels and self._label_ids is not None:
            labelled = self._label_ids >= 0
            sums = torch.zeros(self._labels, weights.shape[1], dtype=torch.float64)
            self._label_sums[read] += sums.index_add_(0, self._label_ids[labelled], weights.double().cpu()[labelled])

    def _geometry(self, index: int, values: Sequence[Tensor]) -> None:
        """Add the lengths of the sources, their angles to the pseudo-query and, at the last read, to one another."""
        flat = [value.detach().flatten(0, -2) for value in values]
        lengths = [self._length(source, value) for source, value in zip(self.layout[index].sources, flat, strict=True)]
        squares = torch.stack(lengths).square().sum(1, dtype=torch.float64)
        self._source_squares[index] += squares.cpu()
        query = self._mechanism.direction(index)
        if query is not None:
            query = query / query.norm().clamp_min(1e-30)
            dots = torch.stack([value @ query.to(value) for value in flat]).float()
            self._cosines[index] += _ratio(dots, torch.stack(lengths)).sum(1, dtype=torch.float64).cpu()
        last = index == len(self.layout) - 1
        if last and len(flat) > 1:
            gram = torch.eye(len(flat), dtype=torch.float64) * flat[0].shape[0]
            for i, a in enumerate(flat):
                for j in range(i):
                    cosines = _ratio((a.float() * flat[j]).sum(-1), lengths[i] * lengths[j])
                    gram[i, j] = gram[j, i] = cosines.sum(dtype=torch.float64).item()
            self._key_cosine += gram
        if last:
            self._lengths.clear()  # and with them the pass's sources

    def _length(self, source: Source, value: Tensor) -> Tensor:
        """Return the length of each token's vector in `value` (tokens, d), measured once a pass for a finished source
        that stays the same tensor from read to read. The tensor is kept with it: no other can take its place."""
        key = source.name, value.data_ptr()
        if key not in self._lengths or source.open:
            length = torch.linalg.vector_norm(value, dim=-1, dtype=compute_dtype(value.dtype))
            self._lengths[key] = value, length
        return self._lengths[key][1]

    def on_write(self, index: int, output: Tensor) -> None:
        if _in_backward():
            return
        self._output_squares[index] += _sum_of_squares(output)
        if self._contributions is not None:
            self._contributions.write(output)
        if output.requires_grad and torch.is_grad_enabled():

            def add_gradient(grad: Tensor) -> None:
                self._grad_squares[index] += _sum_of_squares(grad)
                self._grad_tokens[index] += grad[..., 0].numel()

            output.register_hook(add_gradient)

    # -- magnitudes -----------------------------------------------------------------------------------------------
    def _rms(self, squares: Sequence[float], tokens: Sequence[int] | None = None) -> list[float]:
        counts = tokens or [self.tokens] * len(squares)
        return [(s / max(1, count * self.width)) ** 0.5 for s, count in zip(squares, counts, strict=True)]

    @property
    def output_rms(self) -> list[float]:
        """L values: root mean square (over tokens and width) of each sublayer's output v_l."""
        return self._rms(self._output_squares)

    @property
    def input_rms(self) -> list[float]:
        """R values: root mean square of each read, before its norm."""
        return self._rms(self._input_squares)

    @property
    def grad_rms(self) -> list[float]:
        """L values: root mean square of dL/dv_l over the tokens that have a gradient; empty when no backward ran inside
        the recording."""
        return self._rms(self._grad_squares, self._grad_tokens) if any(self._grad_tokens) else []

    @property
    def source_rms(self) -> list[list[float]]:
        """Root mean square of each source of each read; rows are empty where its values are not shown."""
        return [self._rms(row.tolist()) if torch.is_tensor(row) else [] for row in self._source_squares]

    # -- weights --------------------------------------------------------------------------------------------------
    @property
    def sources(self) -> list[list[str]]:
        """Names of each read's sources; empty before its first pass and where it is no weighted sum."""
        return [
            [source.name for source in read.sources] if torch.is_tensor(row) else []
            for read, row in zip(self.layout, self._weights, strict=True)
        ]

    @property
    def weighs(self) -> bool:
        """Whether every read with sources showed weights, and there is one. A mechanism that shows weights of some
        reads alone, such as those of a single source, does not weigh."""
        pairs = list(zip(self.layout, self.sources, strict=True))
        return any(names for _, names in pairs) and all(names or not read.sources for read, names in pairs)

    @property
    def weights(self) -> list[list[float]]:
        """Mean over tokens of each read's weights. Without a softmax they are the weights that the residual implies
        (standard: ones); a row is empty if it implies none."""
        return [_mean(row, self.tokens) for row in self._weights]

    @property
    def routing(self) -> dict[str, Any] | None:
        """Mean weights over tokens, or None for a residual whose weights are the same for every token.

        `{"weights": R rows, "sources": each row's names, "reads": R names, "layout": the reads as data}`; the last
        for `layout_of`, which makes the reads of it again.
        """
        if not self._mechanism.traits.by_token or not all(self.sources):
            return None
        layout = [read.to_json() for read in self.layout]
        return {"weights": self.weights, "sources": self.sources, "reads": self.reads, "layout": layout}

    @property
    def entropy(self) -> list[float]:
        """R values in nats: mean over tokens of -sum_i p_i ln p_i, p the weights' absolute values over their sum; NaN
        where nothing is weighed."""
        return [
            total / max(1, self.tokens) if names else float("nan") for total, names in zip(self._entropy, self.sources)
        ]

    @property
    def mixing(self) -> np.ndarray | None:
        """(R, L+1): mean over tokens of the depth mixing matrix, h_l = sum_i M[l, i] v_i; None where reads are not
        such sums (a norm in between, or a gate that is a vector)."""
        rows = []
        for index in range(len(self.layout)):
            if not torch.is_tensor(self._weights[index]):
                return None
            row = self._mixing[index] / self.tokens if torch.is_tensor(self._mixing[index]) else None
            if row is None:
                weights = (self._weights[index] / self.tokens).unsqueeze(0)
                row = self._mechanism.mixing_row(index, weights, [])
                if row is None:
                    return None
                row = row[0]
            rows.append(np.pad(row.detach().numpy(), (0, self.num_sublayers + 1 - len(row))))
        return np.stack(rows)

    @property
    def source_cosine(self) -> list[list[float]]:
        """Mean cosine of each source with the read's pseudo-query times its key gain: the logit is sqrt(d) times the
        query's length times this. Rows are empty where a read has no query."""
        return [_mean(row, self.tokens) for row in self._cosines]

    @property
    def key_cosine(self) -> list[list[float]]:
        """(n, n) mean cosine between the sources of the output's read; empty where it has no softmax."""
        return (self._key_cosine / self.tokens).tolist() if torch.is_tensor(self._key_cosine) else []

    # -- contributions ---------------------------------------------------------------------------------------------
    @property
    def contribution(self) -> list[list[float]]:
        """Mean over tokens of each source's contribution to its read (`attnres.inspect.contribution`): signed, rows sum
        to one. Rows are empty where `weights` are, or if it was not recorded."""
        return self._of_contributions("shares")

    @property
    def size(self) -> list[list[float]]:
        """Mean over tokens of |weight| times the RMS of each source of each read."""
        return self._of_contributions("sizes")

    def _of_contributions(self, name: str) -> list[list[float]]:
        if self._contributions is None:
            return [[] for _ in self.layout]
        return [_mean(row, self.tokens) for row in getattr(self._contributions, name)]

    @property
    def mixing_contribution(self) -> np.ndarray | None:
        """(R, L+1): mean over tokens of each single output's contribution to each read; rows sum to one. None if
        `mixing` is, or if it was not recorded."""
        rows = self._of_contributions("output_shares")
        if not all(rows):
            return None
        return np.stack([np.pad(row, (0, self.num_sublayers + 1 - len(row))) for row in rows])

    # -- in a notebook --------------------------------------------------------------------------------------------
    def _about(self) -> str:
        return f"{self.residual}: {len(self.reads)} reads, {self.tokens:,} tokens"

    def _columns(self) -> dict[str, list[list[float]]]:
        return {
            "weight": self.weights,
            "contribution": self.contribution,
            "size": self.size,
            "rms": self.source_rms,
            "cosine": self.source_cosine,
        }

    def _records(self) -> Iterator[dict[str, Any]]:
        return notebook.edges(self.reads, self.sources, **self._columns())

    def to_dict(self) -> dict[str, Any]:
        names = {"residual": self.residual, "reads": self.reads, "sources": self.sources}
        return {"tokens": self.tokens, **names, **self._columns()}

    def _repr_html_(self) -> str:
        if not self.tokens or not all(self.sources):
            return f"<p>{self!r}</p>"
        return notebook.framed(self._shown())

    def _shown(self) -> dict[str, Any]:
        """Return the data of the explorer's page: means over everything recorded and, where tokens were kept, the
        numbers of each token of the last pass."""
        by = "contribution" if all(self.contribution) else "weight"
        weights = self.weights
        pane: dict[str, Any] = {
            **notebook.sheet(self.layout),
            "model": 0,
            "title": f"{self.residual}, {by}s, mean over {self.tokens:,} tokens",
            "notes": [],
            "tokens": [],
            "token": None,
            "loss": None,
            "contributions": self.contribution if by == "contribution" else weights,
            "weights": weights,
            "marked": len(self.layout) - 1,
            "largest": [],
        }
        rows = self.token_contributions if by == "contribution" else self.token_weights
        if rows and len(rows) == len(self.layout) and rows[0][0].shape[0] <= notebook.SHOWN:
            count = rows[0][0].shape[0]
            last = [source.name for source in self.layout[-1].sources]
            place = {column["name"]: i for i, column in enumerate(pane["columns"])}
            pane["names"] = [str(number) for number in range(count)]
            pane["tokens"] = [f" {number}" for number in range(count)]
            pane["losses"] = [None] * count
            pane["largest"] = [place[last[i]] for i in rows[-1][0].abs().argmax(-1).tolist()]
            pane["every"] = {
                name: [row[0].tolist() for row in values]
                for name, values in (("contributions", rows), ("weights", self.token_weights))
            }
        view = {"by": by, "cuts": [], "tab": "explain", "edited": True, "text": ""}
        return plain({"view": view, "message": "", "query": "", "panes": [pane]}, 4)

    # -- by label -------------------------------------------------------------------------------------------------
    @property
    def label_tokens(self) -> np.ndarray:
        """(labels,): how many tokens had each label."""
        return self._label_tokens.numpy().copy()

    @property
    def label_weights(self) -> list[np.ndarray]:
        """For each read (labels, sources): mean weights of the tokens with each label; NaN where there were none."""
        count = np.where(self.label_tokens > 0, self.label_tokens, np.nan)[:, None]
        empty = np.zeros((self._labels, 0))
        return [sums.numpy() / count if torch.is_tensor(sums) else empty for sums in self._label_sums]

    # -- token by token -------------------------------------------------------------------------------------------
    @property
    def token_weights(self) -> list[Tensor]:
        """Weights (B, T, sources) of every read of the last forward pass, fp32 on the CPU; for `tokens=True`."""
        return [self._token_weights[index] for index in sorted(self._token_weights)]

    @property
    def token_contributions(self) -> list[Tensor]:
        """Contributions (B, T, sources) of each source to every read of the last forward pass, as `token_weights`."""
        rows = {} if self._contributions is None else self._contributions.tokens
        return [rows[index].view(*self._shape, -1) for index in sorted(rows)]

    @property
    def token_norms(self) -> Tensor:
        """(B, T, R): root mean square over the width of each read of the last pass, before its norm."""
        return torch.stack([self._token_norms[index] for index in sorted(self._token_norms)], -1)

    @property
    def token_mixing(self) -> list[Tensor] | None:
        """For each read (B, T, L+1): the mixing rows of the last pass's tokens; None where `mixing` is."""
        rows: list[Tensor] = []
        for index, weights in enumerate(self.token_weights):
            flat = weights.flatten(0, -2)
            row = self._mechanism.mixing_row(index, flat, rows)
            if row is None:
                return None
            rows.append(row.detach().expand(flat.shape[0], -1))
        return [row.view(*self._shape, -1) for row in rows]


def _mean(row: Any, tokens: int) -> list[float]:
    return (row / tokens).tolist() if torch.is_tensor(row) and tokens else []


def _ratio(dots: Tensor, lengths: Tensor) -> Tensor:
    return dots / lengths.clamp_min(1e-30)


def _in_backward() -> bool:
    """Return whether a checkpointed layer is being run again, which was recorded the first time."""
    return torch._C._current_graph_task_id() != -1


def _sum_of_squares(x: Tensor) -> float:
    return torch.linalg.vector_norm(x.detach(), dtype=compute_dtype(x.dtype)).double().square().item()


@contextmanager
def record(model: Any, *, tokens: bool = False, labels: int = 0, contributions: bool = True) -> Generator[Trace]:
    """Record what `model`'s residual does while the block runs; logits and gradients stay the same, with gradients bit
    for bit. Every position counts as a token, padding too: of texts of several lengths give one after the other.

    Models compiled by `torch.compile` run uncompiled meanwhile: each recorded sum would cut their graph.

    Args:
        tokens: keep the weights of every token of the last forward pass (`Trace.token_weights` and others).
        labels: keep mean weights by label, of so many labels (`Trace.label`).
        contributions: measure what each source is of each read, beside its weight (`Trace.contribution`).

    >>> with record(model) as trace:  # doctest: +SKIP
    ...     model(input_ids=ids)
    >>> trace.routing["weights"][-1]  # doctest: +SKIP

    Raises:
        UserError: the model has no residual of this package, or is being recorded already.
    """
    residual = find_residual(model)
    with recorded_by(Trace(residual, tokens=tokens, labels=labels, contributions=contributions), residual) as trace:
        yield trace


_T = TypeVar("_T", bound=Trace)


@contextmanager
def recorded_by(trace: _T, residual: Residual) -> Generator[_T]:
    """Record the passes of a residual inside the block into `trace`. Raises UserError as `record`."""
    if residual.observer is not None:
        raise UserError("this model is being recorded already: leave the first `record` block before a second")
    # Only where something may be compiled: importing torch._dynamo takes seconds.
    uncompiled = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with uncompiled, watched_by(residual, observer=trace):
        yield trace
