"""torchtitan's state-dict adapters, carrying the tensors of a residual, names that they would leave out."""

from typing import Any, Protocol

OURS = "residual."
"""What names begin with in a torchtitan model that holds its residual as `model.residual`."""
HF = "model.residual."
"""The same in Hugging Face's layout, where the residual belongs to the base model."""


class StateDictAdapter(Protocol):
    """What torchtitan asks of an adapter's class; it is made from a model's config and a folder."""

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Give Hugging Face's names and shapes to torchtitan's tensors."""
        ...

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Give torchtitan's names and shapes to Hugging Face's tensors."""
        ...


def with_reads(adapter: type[StateDictAdapter]) -> type[StateDictAdapter]:
    """Make a class for `ModelSpec.state_dict_adapter` which also carries `model.residual` of a torchtitan model.

    Everything else is `adapter`'s, one of torchtitan's own. What it writes has the names of our Hugging Face classes.
    """
    base: Any = adapter

    class WithReads(base):
        def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
            reads, others = _apart(state_dict, OURS)
            return super().to_hf(others) | {HF + name: tensor for name, tensor in reads.items()}

        def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
            reads, others = _apart(hf_state_dict, HF)
            return super().from_hf(others) | {OURS + name: tensor for name, tensor in reads.items()}

    WithReads.__name__ = WithReads.__qualname__ = f"{adapter.__name__}WithReads"
    return WithReads


def _apart(tensors: dict[str, Any], prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors below the prefix, by what follows it, and the others."""
    below = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    return below, {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
