"""What a residual is: a network's depth as a stream with two verbs, read and write."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from attnres.errors import UserError
from attnres.ops import Norm, apply_norm, compute_dtype

NormLike = Norm | Callable[[Tensor], Tensor]
"""The norm a read ends with: as a value where its arithmetic is known (then it can be fused), else as a function."""

State = Any
"""A residual's state: an immutable (nested) tuple of tensors, their number a function of depth alone."""


class Observer(Protocol):
    """Sees what a forward pass really does, without changing it."""

    def on_start(self, embedding: Tensor) -> None:
        """A forward pass begins with the token embedding (..., d)."""

    def on_read(
        self, index: int, h: Tensor, weights: Tensor | None, sources: Sequence[str], values: Sequence[Tensor]
    ) -> None:
        """Read `index` made `h` (..., d) before its norm, from `sources` with `weights` (tokens, sources).

        `values` are the sources themselves, (..., d) each, or empty where they are the embedding and the sublayers'
        outputs, one by one.
        """

    def on_write(self, index: int, output: Tensor) -> None:
        """Sublayer `index` wrote `output` (..., d)."""


class Editor(Protocol):
    """Changes the weights of a forward pass's reads. While a residual has one, its reads are made in plain torch.

    Attributes:
        outputs: the running pass's embedding and sublayer outputs so far, (..., d) each, kept from `on_start` and
            `on_write`.
    """

    outputs: Sequence[Tensor]

    def on_start(self, embedding: Tensor) -> None:
        """A forward pass begins with the token embedding (..., d)."""

    def on_write(self, index: int, output: Tensor) -> None:
        """Sublayer `index` wrote `output` (..., d)."""

    def edit(self, index: int, weights: Tensor, sources: Sequence[str]) -> Tensor:
        """The weights that read `index` uses in place of `weights`, both (tokens, sources). They are used as they are:
        rows need not sum to one."""


def sublayer_name(index: int) -> str:
    """ "attention k" or "mlp k" of sublayer 2k or 2k + 1: the name of its read, and of its output as a source."""
    return f"{'mlp' if index % 2 else 'attention'} {index // 2}"


def output_names(count: int) -> list[str]:
    """Names of the embedding and the first `count - 1` sublayers' outputs."""
    return ["embedding", *(sublayer_name(index) for index in range(count - 1))]


def whole(name: str, value: Any, least: int = 1) -> int:
    """`value` if it is a whole number of at least `least`; else a UserError that names the setting."""
    if type(value) is not int or value < least:
        raise UserError(f"{name} is {value!r}: expected a whole number, at least {least}")
    return value


def positive(name: str, value: Any) -> float:
    """`value` if it is a positive number; else a UserError that names the setting."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UserError(f"{name} is {value!r}: expected a positive number")
    return float(value)


def start_at(parameter: nn.Parameter, value: Tensor) -> None:
    """Give a parameter start values that `torch.nn.init` has no function for; one already loaded is left alone."""
    nn.init.zeros_(parameter)
    if not getattr(parameter, "_is_hf_initialized", False) and not parameter.is_meta:
        with torch.no_grad():
            parameter.copy_(value)


class Residual(nn.Module):
    """How the sublayers of one network are connected: their reads and writes, and the parameters these have.

    A *sublayer* is one attention or one MLP; `num_sublayers` is their number L. Reads are numbered 0 .. L-1, the
    output's is L. All parameters of a residual live in this one module: it is small, always fp32, and takes no weight
    decay. `read`, `write` and `finish` never change a state in place.

    A mechanism is a subclass with a `name`, whose keyword arguments after `width` are its settings.
    """

    name: ClassVar[str]
    weighs: ClassVar[bool] = False
    """Whether reads weigh their sources by a softmax."""
    feeds_back: ClassVar[bool] = False
    """Whether what a read made is part of later sources: their expansion then differs from token to token."""

    def __init__(self, num_sublayers: int, width: int) -> None:
        super().__init__()
        self.num_sublayers, self.width = num_sublayers, width
        self.observer: Observer | None = None
        self.editor: Editor | None = None

    def init_parameters(self) -> None:
        """Set every parameter of this module to its start value (through `torch.nn.init` or `start_at`)."""

    def branch_scale(self) -> float:
        """Factor on the start values of value, output and MLP weights (DeepNorm asks for one)."""
        return 1.0

    def start(self, embedding: Tensor) -> State:
        """The state that holds the token embedding (..., d) and nothing else."""
        raise NotImplementedError

    def read(self, state: State, index: int, norm: NormLike) -> tuple[Tensor, State]:
        """The normed input of sublayer `index`, and the state that its write continues from."""
        raise NotImplementedError

    def write(self, state: State, index: int, output: Tensor) -> State:
        """The state after sublayer `index` gave `output`."""
        raise NotImplementedError

    def finish(self, state: State, norm: NormLike) -> Tensor:
        """The normed input of the head."""
        raise NotImplementedError

    def hidden_state(self, state: State) -> Tensor:
        """The state as one vector (..., d), for `output_hidden_states`: of depth reads, the sum of all sources."""
        raise NotImplementedError

    # -- reads as coefficients of the outputs they are made of -----------------------------------------------------
    @property
    def watched(self) -> bool:
        """Whether someone sees or edits the reads."""
        return self.observer is not None or self.editor is not None

    def implied(self, index: int) -> Tensor | None:
        """(index + 1,): what read `index` is in terms of the embedding and the outputs so far, where that is the same
        for every token; None where it is not, or is no such sum."""
        return None

    def direction(self, index: int) -> Tensor | None:
        """(d,): the pseudo-query of read `index` times its key gain, where it has one."""
        return None

    def expand(self, source: str, index: int, rows: Sequence[Tensor]) -> Tensor:
        """(tokens or 1, L+1): source `source` of read `index` as a sum over the embedding and the outputs.

        `rows` are the mixing rows (tokens, L+1) of the reads before it, for mechanisms that feed them back.
        """
        names = output_names(self.num_sublayers + 1)
        return self._span(names.index(source), names.index(source) + 1)

    def _span(self, start: int, stop: int) -> Tensor:
        """(1, L+1): one for outputs start .. stop-1 (0 is the embedding), zero elsewhere."""
        row = torch.zeros(1, self.num_sublayers + 1)
        row[:, start:stop] = 1.0
        return row

    def mixing_row(self, index: int, weights: Tensor, sources: Sequence[str], rows: Sequence[Tensor]) -> Tensor | None:
        """Row `index` of the depth mixing matrix, h_l = sum_i M_{i->l} v_i, of each token.

        Args:
            weights: (tokens, sources) of read `index`. rows: the rows of earlier reads.

        Returns:
            (tokens, L+1), column 0 the embedding; None where h is no sum with one number a source.
        """
        parts = [self.expand(source, index, rows).to(weights) for source in sources]
        return sum((weights[:, i, None] * part for i, part in enumerate(parts)), weights.new_zeros(1, 1))

    def normed(
        self,
        h: Tensor,
        index: int,
        norm: NormLike,
        weights: Tensor | None = None,
        sources: Sequence[str] = (),
        values: Sequence[Tensor] = (),
    ) -> Tensor:
        """norm(h) as read `index`, for mechanisms whose read is not fused with its norm; seen and edited before.

        `weights` (tokens, sources) belong to `sources`; without sources they belong to the embedding and the outputs so
        far, and without weights they are `implied`, or one for a single source.
        """
        if self.watched:
            h = self._watched(h, index, weights, sources, values)
        return apply_norm(h, norm) if isinstance(norm, Norm) else norm(h)

    def _watched(
        self, h: Tensor, index: int, weights: Tensor | None, sources: Sequence[str], values: Sequence[Tensor]
    ) -> Tensor:
        row = h.new_ones(1) if len(sources) == 1 else self.implied(index)
        if weights is None and row is not None:
            weights = row.to(h).expand(h[..., 0].numel(), -1)
        if weights is not None and not sources:
            sources = output_names(index + 1)
        if self.editor is not None:
            if weights is None:
                raise UserError(f"residual '{self.name}' mixes its sources by no weights: there is nothing to edit")
            edited = self.editor.edit(index, weights, sources)
            if edited is not weights:
                h = _mixed_anew(h, weights, edited, values or self.editor.outputs)
            weights = edited.detach()
        if self.observer is not None:
            self.observer.on_read(index, h, weights, sources, values)
        return h


def _mixed_anew(h: Tensor, weights: Tensor, edited: Tensor, values: Sequence[Tensor]) -> Tensor:
    """`h` (..., d), made with `weights` (tokens, n) of `values`, as `edited` weights make it.

    Where a token's weights changed the sum is made again: what taking values from h leaves is rounding, and the norm
    after a read that lost everything, or nearly, makes that as large as any input. Elsewhere h stays as it is.
    """
    dtype = compute_dtype(h.dtype)
    changed = (edited != weights).any(-1, keepdim=True)
    factors = torch.where(changed, edited, edited - weights).to(dtype).view(*h.shape[:-1], -1)
    mixed = h.to(dtype).masked_fill(changed.view(*h.shape[:-1], 1), 0.0)
    for i, value in enumerate(values):
        mixed = mixed + factors[..., i : i + 1] * value
    return mixed.to(h.dtype)


def full_precision(reference: Tensor) -> torch.autocast:
    """Autocast off: depth mixing is a softmax or a sum of many terms, and bf16 loses it."""
    return torch.autocast(reference.device.type, enabled=False)
