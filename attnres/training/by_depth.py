"""What one training step did by depth, a value a sublayer or read."""

from contextlib import AbstractContextManager
from typing import Any

from attnres.stats import plain


def recorded(model: Any) -> AbstractContextManager[Any]:
    """Record the passes of a block of code, forward and backward."""
    from attnres.inspect import record

    return record(model, contributions=False)  # a step's memory stays what it is


def magnitudes(trace: Any, model: Any, unit: int) -> dict[str, Any]:
    """The RMS of outputs, inputs and gradients of a recorded pass and, of depth reads, how they choose.

    `unit` is what the pass's loss is multiplied by to be a mean, so that gradients are those of a mean loss.
    """
    from attnres.inspect import find_residual
    from attnres.inspect.geometry import learned_mixing, sharpness

    values: dict[str, Any] = {
        "output_rms": trace.output_rms,
        "input_rms": trace.input_rms,
        "grad_rms": [value * unit for value in trace.grad_rms],
    }
    residual = find_residual(model)
    if residual.traits.by_token:
        values["entropy"] = trace.entropy
    if residual.traits.has_query:
        values["sharpness"] = sharpness(residual)
    values |= learned_mixing(residual) or {}
    return plain(values, digits=17)  # a read may show no weights, of which NaN is the entropy
