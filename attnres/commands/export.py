"""`attnres export`: a model as a graph for other runtimes."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from attnres.errors import UserError
from attnres.flags import parse


@dataclass
class Export:
    """Write a model as a graph for other runtimes, its logits compared with the model's; or its weights."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Run folder, model folder or hub name."""
    out: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT")]
    """Folder to write, new or empty."""
    onnx: bool = False
    """Write ONNX, checked in onnxruntime (extra `export`); otherwise a file for torch.export.load."""
    weights: bool = False
    """Write Hugging Face safetensors, also of a sharded checkpoint."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""


def run(arguments: list[str]) -> None:
    """Parse the arguments after the command's name and carry them out."""
    options = parse("export", Export, arguments)

    remote = options.trust_remote_code
    if options.weights:
        if options.onnx:
            raise UserError("both --weights and --onnx are given: give one of them")
        from attnres.training.checkpoint import export_weights

        print(export_weights(options.model, options.out, trust_remote_code=remote))
        return

    from attnres.models.export import export_graph

    print(export_graph(options.model, options.out, onnx=options.onnx, trust_remote_code=remote))
