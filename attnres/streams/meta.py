"""Residuals created on the meta device: once moved to a device they run only after they were initialised."""

import operator
from collections.abc import Callable
from typing import Any, cast

from torch import nn

from attnres.errors import UserError
from attnres.residuals import Residual
from attnres.residuals.queries import Queried
from attnres.streams.known_norms import Exchanged, exchange, own_class


class Uninitialised(Exchanged):
    """Mixin for the class of an uninitialised residual. On the meta device it runs, for shapes and FLOP counts."""

    versions: list[int] | None = None
    """Versions of its parameters when `to_empty` allocated them; writing values changes the versions."""

    def init_parameters(self) -> None:
        cast(Any, own_class(self)).init_parameters(self)
        note_values(self)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        was_meta = _on_meta(self)
        super()._apply(fn, recurse)
        if was_meta and not _on_meta(self):
            self.versions = [one._version for one in self.parameters()]
            for part in self.modules():
                if isinstance(part, Queried) and part.query_lr != 1.0:
                    part.query_scale.fill_(part.query_lr)
        return self

    def forward(self, verb: str, *args: Any) -> Any:
        now = [one._version for one in self.parameters()]
        if verb != "itself" and any(map(operator.eq, now, self.versions or ())):
            raise UserError(
                "the queries of the depth reads were created on the meta device and never initialised: call "
                "reset_parameters() of the residual after to_empty, or load a state dict that has them"
            )
        return super().forward(verb, *args)


def wait_for_values(residual: Residual) -> None:
    """Let a residual on the meta device refuse passes with uninitialised memory."""
    if _on_meta(residual):
        exchange(residual, Uninitialised)
        residual.register_load_state_dict_post_hook(_note_loaded)


def _on_meta(residual: nn.Module) -> bool:
    return any(one.is_meta for one in residual.parameters())


def note_values(residual: nn.Module) -> None:
    """Restore a residual's own class if its parameters are on a device."""
    if isinstance(residual, Uninitialised) and not _on_meta(residual):
        residual.__dict__.pop("versions", None)
        residual.__class__ = own_class(residual)


def _note_loaded(residual: nn.Module, keys: Any) -> None:
    """Note that a state dict with the residual's parameters was loaded."""
    missing = {key.rpartition(".")[2] for key in keys.missing_keys if ".residual." in f".{key}"}
    if not missing & {name.rpartition(".")[2] for name, _ in residual.named_parameters()}:
        note_values(residual)
