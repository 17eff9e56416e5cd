"""`attnres convert`: depth reads for a pretrained model."""

from dataclasses import dataclass, field
from typing import Annotated

import tyro

from attnres.errors import UserError
from attnres.flags import Settings, parse


@dataclass
class Convert:
    """Give a pretrained model depth reads without changing its logits, and write it.

    A checkpoint of another project's depth reads (open-attention-residuals, FLA, Kimi K3's names, the nanoGPT study's)
    is recognised and converted to the layout of attnres; --to writes a model of attnres in the format of the first two.
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Folder or hub name of a Hugging Face causal language model, a run or model of attnres with the standard residual,
    or a checkpoint of another project's depth reads."""
    out: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT")]
    """Folder to write, new or empty."""
    residual: str | None = None
    """How sublayers read earlier outputs: a mechanism that equals the standard residual at the start, or FILE.py:CLASS;
    none is block."""
    block_size: int | None = None
    """Sublayers (attention and MLP count apart) in a block; give this or num_blocks."""
    num_blocks: int | None = None
    """Number of blocks; give this or block_size."""
    read_scale: str | None = None
    """sum or mean; none is sum, which keeps the logits exactly. mean, the paper's, does up to the eps of the norms."""
    settings: Settings = field(default_factory=dict)
    """Other settings of the residual, e.g. null_source=true."""
    dtype: str | None = None
    """Weights in bf16, fp16, fp32 or fp64; none keeps the model's own."""
    to: str | None = None
    """Write a model of attnres in the format of another project: open-attnres, fla or kimi."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""


def run(arguments: list[str]) -> None:
    """Parse the arguments after the command's name and carry them out."""
    options = parse("convert", Convert, arguments, doing="loading the model, to compare its logits before and after")

    from attnres.models import convert, export_model, open_checkpoint

    settings = dict(options.settings)
    for name in ("block_size", "num_blocks", "read_scale"):
        if (value := getattr(options, name)) is not None:
            if name in settings:
                raise UserError(f"both --{name.replace('_', '-')} and --settings {name}= are given: give one of them")
            settings[name] = value
    named = ("residual", "dtype", "block_size", "num_blocks", "read_scale")
    flags = [f"--{name.replace('_', '-')}" for name in named if getattr(options, name) is not None]
    flags += [f"--settings {name}=" for name in options.settings]
    remote = options.trust_remote_code
    if options.to is not None:
        _refuse_changes(f"--to {options.to}", flags)
        print(export_model(options.model, options.out, options.to, trust_remote_code=remote))
        return
    if open_checkpoint(options.model, trust_remote_code=remote).kind == "foreign":
        _refuse_changes(f"{options.model}, which has the depth reads of another project,", flags)
        print(export_model(options.model, options.out, trust_remote_code=remote))
        return
    residual = options.residual or "block"
    print(convert(options.model, residual, out=options.out, dtype=options.dtype, trust_remote_code=remote, **settings))


def _refuse_changes(what: str, flags: list[str]) -> None:
    """Refuse flags that would change a model which `convert` writes unchanged."""
    if flags:
        raise UserError(f"{what} is written unchanged: leave out {', '.join(flags)}")
