"""Streams of passes without gradients, whose sources are in a bank."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from attnres.device import autocast_dtype
from attnres.errors import UserError
from attnres.ops.bank import Bank
from attnres.ops.norms import Norm
from attnres.ops.sharded import settled
from attnres.residuals import Residual
from attnres.residuals.program import take_bank
from attnres.residuals.state import as_it_is
from attnres.streams.inputs import Inputs
from attnres.streams.known_norms import describe_norm
from attnres.streams.passes import REENTRANT_IS_REFUSED, hidden_states_wanted, reentrant
from attnres.streams.stream import UNREAD, Stream


def start_stream(residual: nn.Module, embedding: Tensor, *, hooked: bool = False) -> Stream:
    """Begin a forward pass.

    Args:
        residual: a `Residual`, or a wrapper of one, which is called for every `read` and `write`, so that its hooks
            run.
        hooked: whether a hook sees the streams between layers.

    Raises:
        UserError: reentrant checkpointing would drop gradients.
    """
    inner = residual if isinstance(residual, Residual) else residual("itself")
    if inner.stream_dtype is not None:
        embedding = embedding.to(inner.stream_dtype)
    if torch.compiler.is_compiling():
        return Stream.plain(residual, embedding)
    # a leaf may require gradients although nobody wants them; a computed tensor that does is a sign that somebody does
    if not torch.is_grad_enabled() and any(
        isinstance(one, Tensor) and one.grad_fn is not None for one in reentrant(residual) or ()
    ):
        raise UserError(REENTRANT_IS_REFUSED)
    if isinstance(residual, Residual) and not hidden_states_wanted.get():
        bank = None if hooked else take_bank(residual, embedding)
        if bank is not None:
            return BankStream(residual, bank, 0)
    return Stream.plain(residual, embedding)


class BankStream(Stream):
    """One forward pass without gradients, before sublayer `index`. Its sources are in a bank that changes as the pass
    continues, so only the latest stream of a pass can be read; an earlier one raises an error."""

    def __init__(self, residual: Residual, bank: Bank, index: int, values: Tensor | None = None) -> None:
        self.residual, self.bank, self.index, self.values = residual, bank, index, values
        self.number, self.like = bank.number, bank.embedding
        self._inputs: Inputs | None = None

    def _refusal(self) -> RuntimeError:
        return RuntimeError(
            f"the stream before sublayer {self.index} cannot be asked: a pass without gradients keeps its sources in "
            "one place and goes on; pass output_hidden_states=True, or put an observer on the residual. If a norm's "
            "forward was replaced, put back the one that reads the stream"
        )

    def read(self, norm: nn.Module | None) -> Tensor | Inputs:
        bank, index = self.bank, self.index
        residual = cast(Residual, self.residual)
        if bank.index != index or bank.number != self.number:
            raise self._refusal()
        known = bank.norms[index]
        if known is None or not known.holds(norm):
            known = bank.norms[index] = KnownNorm(norm, self.like, bank)
            bank.set_norm(known.fused)
        x = bank.read()
        if known.fused is None:
            scale = bank.scale()
            x = known.apply(x if scale == 1.0 else x * scale)
        if index == residual.num_sublayers:
            residual.banks.put(bank)
            return x
        return x if residual.value_mix is None else self._with_values(x, residual)

    def __add__(self, output: Tensor) -> "Stream":
        bank, index = self.bank, self.index
        if bank.index != index or bank.number != self.number:
            raise self._refusal()
        if not bank.was_read:
            raise UserError(UNREAD.format(index))
        if type(output) is not Tensor:
            output = settled(output)
        like = self.like
        if output.requires_grad or output.device != like.device or output.shape != like.shape or not output.data_ptr():
            raise RuntimeError(
                f"sublayer {index} gave a {type(output).__name__} of shape {tuple(output.shape)} on {output.device}, "
                f"requires_grad={output.requires_grad}: expected {tuple(like.shape)} in memory of "
                f"{like.device} and without gradients, as the pass began; begin it with gradients on"
            )
        bank.write(output)
        values = self.values if self._inputs is None else self._inputs.first
        after = BankStream(cast(Residual, self.residual), bank, index + 1, values)
        after.inside = True
        return after

    __radd__ = __add__

    def written(self) -> Any:
        raise self._refusal()

    def hidden_state(self) -> Tensor:
        raise self._refusal()

    def to(self, *args: Any, **kwargs: Any) -> "Stream":
        return self


class KnownNorm:
    """A norm module, remembered by a bank's read from one pass to the next.

    Attributes:
        fused: the norm as a value if its arithmetic is known; else None, and `apply` is the module's forward, or the
            identity.
    """

    def __init__(self, module: nn.Module | None, like: Tensor, bank: Bank) -> None:
        spec = as_it_is if module is None else describe_norm(module, like)
        self.module, self.fused = module, spec if isinstance(spec, Norm) else None
        self.apply = as_it_is if isinstance(spec, Norm) else spec
        self.places = _places(self.fused)
        vectors = () if self.fused is None else (self.fused.weight, self.fused.bias)
        self.is_copied = not all(vector is None or bank.takes(vector) for vector in vectors)
        self.device = like.device.type
        self.eps_name = "eps" if isinstance(module, nn.LayerNorm | nn.RMSNorm) else "variance_epsilon"

    def holds(self, module: nn.Module | None) -> bool:
        """Return whether `module` is this norm with its weights at the same addresses (the bank has no copies), the
        same eps and the same autocast."""
        fused = self.fused
        if module is not self.module or fused is None or module is None:
            return module is self.module
        if self.is_copied:
            return False
        vectors = module._parameters
        return (
            vectors.get("weight") is fused.weight
            and vectors.get("bias") is fused.bias
            and self.places == _places(fused)
            and getattr(module, self.eps_name) == fused.eps
            and autocast_dtype(self.device) is fused.out_dtype
        )


def _places(norm: Norm | None) -> tuple[int, int]:
    """Return the addresses of a norm's weight and bias."""
    weight, bias = (None, None) if norm is None else (norm.weight, norm.bias)
    return (0 if weight is None else weight.data_ptr()), (0 if bias is None else bias.data_ptr())
