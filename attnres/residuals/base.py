"""The class that a residual mechanism subclasses: sublayers read from a network's depth and write to it."""

from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attnres.ops.bank import Banks
from attnres.residuals.described import Described
from attnres.residuals.program import Banked, has_hooks
from attnres.residuals.state import Cut, State, Ways
from attnres.residuals.watch import NormLike, Watched


class Residual(Described, Watched, Cut, Banked):
    """Connect the sublayers of one network: their reads and writes, and the parameters these have.

    A *sublayer* takes from the stream and writes to it once: an attention or an MLP. `num_sublayers` is their number L.
    A *read* is one mixture of sources. Reads are numbered as `layout` lists them, the output's last: where every
    sublayer has one, read l is that of sublayer l, and the output's is L. A sublayer has more where queries, keys and
    values of an attention are read apart.

    A mechanism is a subclass with a `name` and `traits`, whose keyword arguments after `width` are its settings. It
    defines `start, read, write, hidden_state`, which never change a state in place, and `finish` where the head's read
    is unlike the others. `sources` and `implied` (`Described`) say what its reads mix. The other parts have defaults:
    who watches (`Watched`), what crosses a cut of a pipeline (`Cut`), which passes take a bank (`Banked`).

    All parameters live in this one module: it is small, fp32, and takes no weight decay. A model calls the module,
    `residual("read", state, index, norm)`, so that hooks on it (adapters, offloading, sharding) work.
    """

    name: ClassVar[str]
    parts: ClassVar[tuple[type, ...]] = ()
    """Classes that the constructor makes from its keyword arguments: theirs are settings of the mechanism too."""
    slow: tuple[str, ...] = ()
    """Parameters that train at a tenth of the model's rate. A logit sums d products of query and key without 1/sqrt(d),
    so that an equal step moves it too far (docs/explanation/query_rate.md)."""

    # Of interest to few: `compose` asks the first, models that draw start values the second.
    hands_on_sum: bool = False
    """What `handed_on` gives is the plain sum of the embedding and all outputs."""
    even_start: bool = False
    """Output weights start alike at any depth, also in a family that draws them smaller with depth (GPT-2)."""

    # Training sets the last two of these.
    heeds_recompute: bool = False
    """The mechanism's own `read` keeps less where `recompute_reads` is set; else a read is checkpointed."""
    recompute_reads: bool = False
    """Keep nothing of a read for the backward pass, and make the read again there: less memory, more time."""
    stream_dtype: torch.dtype | None = None
    """The dtype of the stream from the embedding on; None is that in which the embedding comes."""

    def __init__(self, num_sublayers: int, width: int) -> None:
        super().__init__()
        self.num_sublayers, self.width = num_sublayers, width
        self.banks = Banks()
        # Set here and not in the class: nn.Module would not find a module that is assigned to such a name later.
        self.value_mix = self.observer = self.editor = None
        self.scale_is_default = False
        """Nobody chose between means and sums of sources: the first pass warns where the two differ."""

    def start(self, embedding: Tensor) -> State:
        """Return the state that holds the token embedding (..., d) and nothing else."""
        raise NotImplementedError

    def read(self, state: State, index: int, norm: NormLike) -> tuple[Tensor | Ways, State]:
        """Return the normed input of sublayer `index` and the state that its write continues from.

        The input is a `Ways`, one tensor for each of an attention's projections, where `ways(index)` names them.
        """
        raise NotImplementedError

    def write(self, state: State, index: int, output: Tensor) -> State:
        """Return the state after sublayer `index` gave `output`."""
        raise NotImplementedError

    def finish(self, state: State, norm: NormLike) -> Tensor:
        """Return the normed input of the head, which is the output's read; unless a mechanism says otherwise, as `read`
        makes it after the last sublayer."""
        return cast(Tensor, self.read(state, self.num_sublayers, norm)[0])

    def hidden_state(self, state: State) -> Tensor:
        """Return the state as a vector (..., d) for `output_hidden_states`: of depth reads, the sum of all sources."""
        raise NotImplementedError

    def handed_on(self, state: State) -> Tensor:
        """Return the stream (..., d) that layers of another rule go on with, after the last sublayer: at the start of a
        rule that starts as the standard residual the plain sum of all outputs."""
        return self.hidden_state(state)

    def init_parameters(self) -> None:
        """Set every parameter of this module to its start value (through `torch.nn.init` or `start_at`).

        Call it last in your `__init__`; models call it again after a start on the meta device.
        """

    def reset_parameters(self) -> None:
        """Do what `init_parameters` does, by the name that torch, FSDP and Lightning call after a start on meta."""
        self.init_parameters()

    def branch_scale(self) -> float:
        """Return the factor on the start values of value, output and MLP weights (DeepNorm asks for one)."""
        return 1.0

    def forward(self, verb: str, *args: Any) -> Any:
        """Call the method named `verb`. By name, so that it passes `__call__` and its hooks (adapters, FSDP)."""
        call = getattr(self, verb)
        if not (self.recompute_reads and verb in ("read", "finish") and torch.is_grad_enabled()):
            return call(*args)
        if self.heeds_recompute or self.watched:  # who watches would see a read twice
            return call(*args)
        return checkpoint(call, *args, use_reentrant=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Residual":
        """Move or cast as asked, but keep parameters in fp32 where 16 bits are asked for (`.to(torch.bfloat16)`,
        Lightning's bf16-true): steps of a small rate would round to nothing there."""

        def precise(tensor: Tensor) -> Tensor:
            new = fn(tensor)
            narrows = tensor.is_floating_point() and new.element_size() < 4 <= tensor.element_size()
            return tensor.to(new.device) if narrows else new

        return super()._apply(precise, recurse)

    def itself(self) -> "Residual":
        """Return this module, also from under a wrapper: `wrapped("itself")`."""
        return self

    def set_progress(self, fraction: float) -> None:
        """Take note of `fraction`, the coming step divided by all steps, in (0, 1]; keep it in a buffer."""

    def penalty(self) -> Tensor | None:
        """Return a scalar with its gradient that training adds to the loss once a step, and to no loss that it reports;
        None without."""
        return None


def verbs(residual: nn.Module) -> Callable[..., Any]:
    """Return the callable that runs verbs: a residual's own `forward`, or the module if hooked or a wrapper."""
    return residual.forward if isinstance(residual, Residual) and not has_hooks(residual) else residual
