"""`attnres doctor`: find faults of a model with depth reads that raise no error."""

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from attnres.errors import UserError
from attnres.flags import parse
from attnres.imports import from_file

if TYPE_CHECKING:
    from torch import nn

TOKENS = 64


@dataclass
class Doctor:
    """Find faults that no error tells, one line each; exit status 1 if there is one.

    Parameters (frozen, in 16 bits, tied against the config), a run's optimizer groups, saturated queries; and by one
    forward and backward pass: gradients, recomputation, graph breaks, the path of reads, sources that nothing reads.
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL|RUN|FILE.py:FUNCTION")]
    """A model folder or hub name, a run folder, or a function without arguments in a file of yours that returns the
    model, or (model, optimizer), or (model, optimizer, example)."""
    text: str | None = None
    """Text of the pass; none takes 64 token ids."""
    json: bool = False
    """Print JSON."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""


def run(arguments: list[str]) -> None:
    """Parse the arguments after the command's name and carry them out."""
    options = parse("doctor", Doctor, arguments, doing="loading the model and looking for faults")

    from attnres.inspect.doctor import examine

    model, optimizer, example = _subject(options)
    findings = examine(model, optimizer, example)
    if options.json:
        print(json.dumps([finding.to_dict() for finding in findings], indent=2))
    else:
        print("\n".join(map(str, findings)) or "no fault found")
    if findings:
        sys.exit(1)


def _subject(options: Doctor) -> "tuple[nn.Module, Any, Any]":
    """Return the model, its optimizer or None, and an example batch or None."""
    if ".py:" in options.model:
        return _from_file(options.model)
    import torch

    from attnres.inspect.effects import prompt_ids
    from attnres.models import open_checkpoint
    from attnres.reading import read_json
    from attnres.training.config import from_dict
    from attnres.training.optim import build_optimizers

    checkpoint = open_checkpoint(options.model, trust_remote_code=options.trust_remote_code)
    model = checkpoint.load()
    optimizer = None
    if checkpoint.run is not None:
        config = from_dict(read_json(checkpoint.run / "config.json"))
        optimizer = build_optimizers(model, config.optim) if config.finetune.train_only == "all" else None
    if options.text is not None:
        ids = prompt_ids(model, options.text)
    else:
        vocabulary = checkpoint.vocab_size or model.config.get_text_config().vocab_size
        ids = (torch.arange(min(TOKENS, checkpoint.context)) * 7 % vocabulary)[None]
    return model, optimizer, {"input_ids": ids}


def _from_file(entry: str) -> "tuple[nn.Module, Any, Any]":
    """Call FILE.py:FUNCTION and return its model, optimizer and example batch; a part that it does not return is
    None."""
    from torch import nn

    function, entry, _ = from_file(entry, "function")
    try:
        result = function()
    except (UserError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise UserError(f"{entry} fails ({type(error).__name__}: {error}): fix it first") from error
    parts = result if isinstance(result, tuple) else (result,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise UserError(f"{entry} returned {kinds}: expected a model, an optimizer and an example, in order")
    optimizer, example = (*parts[1:], *[None] * (3 - len(parts)))
    return parts[0], optimizer, example
