"""The model card of a folder: what the model is, how to load it, what was measured."""

from pathlib import Path
from typing import Any

from attnres.hub import is_hub_name
from attnres.text import with_settings


def model_card(model: Any, source: str | None, report: Any = None, *, reloaded: bool = False) -> str:
    """Return README.md.

    Args:
        model: with depth reads, in memory.
        source: the model that it was made from; None where it is of its own training.
        report: of the conversion, where there was one.
        reloaded: what was written has been loaded and compared.
    """
    config, name = model.config, type(model).__name__
    residual = with_settings(f"`{config.residual}`", config.residual_settings)
    names = reversed((getattr(config, "auto_map", None) or {}).items())
    auto = next((auto for auto, cls in names if cls.endswith(f".{name}")), "AutoModel")
    head = ["---", "library_name: transformers", "tags:", "- attnres", "- attention-residuals"]
    on_hub = source is not None and "/" in source and is_hub_name(source) and not Path(source).exists()
    head += [f"base_model: {source}"] if on_hub else []
    lines = [
        *head,
        "---",
        "",
        f"# {name}",
        "",
        f"{model.plain_class.__name__} with residual {residual}: each sublayer reads a mixture of earlier outputs "
        "instead of their plain sum (Attention Residuals, arXiv 2603.15031)."
        + (f" Made from {source}." if source else ""),
        "",
        "```python",
        f"from transformers import {auto}      # pip install attnres",
        "",
        f'model = {auto}.from_pretrained("this folder", trust_remote_code=True)',
        "```",
        "",
        "or `attnres.load(folder)`. `modeling_attnres.py` only imports attnres. The plain class of Transformers would "
        "leave the residual's parameters out and compute something else.",
    ]
    if report is not None:
        reload = ", and loading what was written gave the same outputs again. `conversion.json` has the details"
        lines += [
            "",
            f"When it was made, its outputs differed from the source's by at most {report['max_difference']:.2g} of "
            f"{report['logit_scale']:.3g} ({report['arithmetic']}, {report['tokens']} tokens){reload * reloaded}.",
        ]
    return "\n".join(lines) + "\n"
