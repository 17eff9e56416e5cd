"""Checkpoints of other projects' depth reads: their configs, names and weights as ours, and for three of them back.

open-attnres  open-attention-residuals: Qwen3, layout `cumulative`; blocks counted as ceil(layers / num_blocks) layers
fla           flash-linear-attention's Transformer: the paper's layout, `attnres_block_size` in sublayers
kimi          Kimi K3's release: the paper's layout, `attn_res_block_size` in layers; its reads on any family
nanogpt       the nanoGPT study: GPT-2, layout `boundary`, whole layers
"""

from collections.abc import Mapping
from typing import Any

from attnres.errors import UserError
from attnres.models.foreign.format import Format, WrittenFormat
from attnres.models.foreign.formats import FLA, NanoGPT, OpenAttnRes
from attnres.models.foreign.kimi import Kimi

FORMATS: dict[str, Format] = {kind.name: kind for kind in (OpenAttnRes(), FLA(), Kimi(), NanoGPT())}
WRITTEN = {name: kind for name, kind in FORMATS.items() if isinstance(kind, WrittenFormat)}
"""Those that models of ours are written in, because a project reads them."""


def formats_of(fields: Mapping[str, Any]) -> list[Format]:
    """Return the formats whose fields a config.json has: none for a plain model's or one of ours, else mostly one."""
    if str(fields.get("model_type")).startswith("attnres_"):
        return []
    return [kind for kind in FORMATS.values() if kind.matches(dict(fields))]


def format_of(name: str, fields: Mapping[str, Any]) -> Format:
    """Return the format of the checkpoint called `name`, which has at least one. Raises UserError where it has two."""
    first, *others = formats_of(fields)
    if others:
        raise UserError(
            f"config.json of {name} has fields of '{first.name}' and '{others[0].name}': remove those of the one that "
            "it is not of"
        )
    return first
