"""`attnres export`: a model as a graph for other runtimes."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from attnres.flags import parse


@dataclass
class Export:
    """Write a model as a graph of plain operators, whose logits are compared with the model's."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Run folder, model folder or hub name."""
    out: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT")]
    """Folder to write, new or empty."""
    onnx: bool = False
    """ONNX, checked in onnxruntime (extra `export`); else what torch.export.load opens."""


def run(arguments: list[str]) -> None:
    """Parse the arguments after the command's name and carry them out."""
    options = parse("export", Export, arguments)

    from attnres.models.portable import export_graph

    print(export_graph(options.model, options.out, onnx=options.onnx))
