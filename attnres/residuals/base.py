"""The base class of residual mechanisms: sublayers read from earlier outputs and write theirs."""

from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attnres.ops.bank import Banks
from attnres.residuals.described import Described
from attnres.residuals.program import Banked, has_hooks
from attnres.residuals.state import Cut, State, Ways, as_it_is
from attnres.residuals.watch import NormLike, Watched


class Residual(Described, Watched, Cut, Banked):
    """Connect the sublayers of one network: their reads and writes, and the parameters these have.

    A *sublayer* (an attention or an MLP) reads from the stream and writes to it once; `num_sublayers` is their number
    L. A *read* is one mixture of sources. Reads are numbered as in `layout`, the output's last: if every sublayer has
    one, read l belongs to sublayer l, and the output's is L. An attention has several if its queries, keys and values
    have separate reads.

    A mechanism is a subclass with a `name` and `traits`, whose keyword arguments after `width` are its settings. It
    defines `start, read, write, hidden_state`, which never change a state in place, and `finish` if the head's read
    differs from the others. `sources` and `implied` (`Described`) describe what its reads mix. The other parts have
    defaults: observers (`Watched`), tensors that cross a pipeline cut (`Cut`), passes that use a bank (`Banked`).

    All parameters are in this one module, which is small, fp32, and has no weight decay. A model calls the module,
    `residual("read", state, index, norm)`, so that hooks on it (adapters, offloading, sharding) run.
    """

    name: ClassVar[str]
    parts: ClassVar[tuple[type, ...]] = ()
    """Classes that the constructor instantiates from its keyword arguments; their arguments are settings of the
    mechanism too."""
    slow: tuple[str, ...] = ()
    """Parameters that train at 0.1 times the model's learning rate. A logit sums d products of query and key without
    1/sqrt(d), so an equal step would be too large (docs/explanation/query_rate.md)."""

    # Rarely needed: `compose` reads the first, models that draw start values read the second.
    hands_on_sum: bool = False
    """Whether `handed_on` returns the plain sum of the embedding and all outputs."""
    even_start: bool = False
    """Whether output weights start with the same size at any depth, even in a family that shrinks them with depth
    (GPT-2)."""

    # Training sets the last two of these.
    heeds_recompute: bool = False
    """Whether the mechanism's `read` handles `recompute_reads` itself; otherwise its reads are checkpointed."""
    recompute_reads: bool = False
    """Store nothing of a read for the backward pass, and recompute the read there: less memory, more time."""
    stream_dtype: torch.dtype | None = None
    """Dtype of the stream from the embedding on; None is the embedding's dtype."""

    def __init__(self, num_sublayers: int, width: int) -> None:
        super().__init__()
        self.num_sublayers, self.width = num_sublayers, width
        self.banks = Banks()
        # Set here and not in the class: a class attribute would hide a module that is assigned to the name later.
        self.value_mix = self.observer = self.editor = None
        self.scale_is_default = False
        """Nobody chose between means and sums of sources: the first pass warns where the two differ."""

    def start(self, embedding: Tensor) -> State:
        """Return the state that holds only the token embedding (..., d)."""
        raise NotImplementedError

    def read(self, state: State, index: int, norm: NormLike) -> tuple[Tensor | Ways, State]:
        """Return the normed input of sublayer `index`, and the state to pass to its write.

        The input is a `Ways`, one tensor for each of an attention's projections, if `ways(index)` names several.
        """
        raise NotImplementedError

    def write(self, state: State, index: int, output: Tensor) -> State:
        """Return the state after sublayer `index` wrote `output`."""
        raise NotImplementedError

    def finish(self, state: State, norm: NormLike) -> Tensor:
        """Return the normed input of the head, which is the output's read; by default computed as `read` does after the
        last sublayer."""
        return cast(Tensor, self.read(state, self.num_sublayers, norm)[0])

    def hidden_state(self, state: State) -> Tensor:
        """Return the state as a vector (..., d) for `output_hidden_states`; for depth reads the sum of all sources."""
        raise NotImplementedError

    def handed_on(self, state: State) -> Tensor:
        """Return the stream (..., d) that layers of another rule continue with after the last sublayer. For a rule that
        starts as the standard residual it is, at the start, the plain sum of all outputs."""
        return self.hidden_state(state)

    @torch.no_grad()
    def weights_by_verbs(self, read: int) -> Tensor:
        """Return the weights of the embedding and the outputs in read number `read` (L: the head's), (read + 1,), by a
        pass in which output i is the unit vector i. It is `implied` for a rule whose reads, one a sublayer, are sums of
        outputs with the same weights for every token."""
        units = torch.eye(self.num_sublayers + 1, device=next(self.parameters(), torch.empty(0)).device)
        state = self.start(units[0])
        for index in range(read):
            state = self.write(state, index, units[index + 1])
        h = self.finish(state, as_it_is) if read == self.num_sublayers else self.read(state, read, as_it_is)[0]
        return cast(Tensor, h)[: read + 1].cpu()

    def init_parameters(self) -> None:
        """Set every parameter of this module to its start value (through `torch.nn.init` or `start_at`).

        Call it last in your `__init__`; models call it again after a start on the meta device.
        """

    def reset_parameters(self) -> None:
        """Call `init_parameters`, under the name that torch, FSDP and Lightning call after a start on the meta
        device."""
        self.init_parameters()

    def branch_scale(self) -> float:
        """Return the factor on the start values of value, output and MLP weights; DeepNorm has one."""
        return 1.0

    def forward(self, verb: str, *args: Any) -> Any:
        """Call the method named `verb`. Calling by name runs `__call__` and its hooks (adapters, FSDP)."""
        call = getattr(self, verb)
        if not self.recompute_reads or verb not in ("read", "finish") or not torch.is_grad_enabled():
            return call(*args)
        if self.heeds_recompute or self.watched:  # an observer would see a checkpointed read twice
            return call(*args)
        return checkpoint(call, *args, use_reentrant=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Residual":
        """Move or cast the module, but keep parameters in fp32 if a 16-bit dtype is asked for (`.to(torch.bfloat16)`,
        Lightning's bf16-true), because in 16 bits small steps would be rounded away."""

        def precise(tensor: Tensor) -> Tensor:
            new = fn(tensor)
            narrows = tensor.is_floating_point() and new.element_size() < 4 <= tensor.element_size()
            return tensor.to(new.device) if narrows else new

        return super()._apply(precise, recurse)

    def itself(self) -> "Residual":
        """Return this module, also from under a wrapper: `wrapped("itself")`."""
        return self

    def set_progress(self, fraction: float) -> None:
        """Store `fraction`, the next step divided by the number of steps, in (0, 1], in a buffer, if the mechanism
        needs it."""

    def penalty(self) -> Tensor | None:
        """Return a scalar with a gradient, which training adds to the loss once a step but not to reported losses; None
        without."""
        return None


def verbs(residual: nn.Module) -> Callable[..., Any]:
    """Return the callable that runs verbs: a residual's own `forward`, or the module if hooked or a wrapper."""
    return residual.forward if isinstance(residual, Residual) and not has_hooks(residual) else residual
