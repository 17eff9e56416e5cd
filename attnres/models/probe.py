"""Find where an unlisted Transformers model reads and writes its stream, by observing one forward pass."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from attnres.errors import UserError
from attnres.models.exactness import fixed_inputs, logits
from attnres.models.families import Family, layer_count
from attnres.streams.find import NoFitError, find_reads
from attnres.streams.layers import kinds_of


def probe(model: PreTrainedModel) -> Family:
    """Return the family of this model, by a forward pass over four tokens (or a picture, or a sound).

    Raises:
        UserError: the model does not follow the pattern; the message has the reason.
    """
    name = type(model).__name__
    base: nn.Module = getattr(model, model.base_model_prefix, model)
    try:
        path, layers = _find_layers(base, model.config)
        pattern = find_reads(base, list(layers), lambda: logits(model, fixed_inputs(model, 4)))
    except NoFitError as reason:
        raise UserError(f"{name} cannot have depth reads: it {reason}") from None
    return Family(
        sublayers=kinds_of(len(pattern.reads)),
        config=type(model.config).__name__,
        causal_lm=name,
        layers=path,
        reads=pattern.reads,
        final_norm=pattern.final_norm or "",
        normed=pattern.normed,
        branch_weights=(),
    )


def _find_layers(base: Any, config: Any) -> tuple[str, nn.ModuleList]:
    """Return the path and the layers of the text decoder, or of the only stack."""
    count = layer_count(config)
    inside, prefix = base, ""
    if config.is_encoder_decoder or config.get_text_config() is not config:
        inside = base.get_decoder()
        prefix = next((path for path, module in base.named_modules() if module is inside and path), "")
    named = [(path, m) for path, m in inside.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not named:
        raise NoFitError(f"has no list of {count} layers")
    path, layers = max(named, key=lambda pair: sum(p.numel() for p in pair[1].parameters()))
    return f"{prefix}.{path}" if prefix else path, layers
