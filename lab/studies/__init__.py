"""The laboratory's studies, one a file, each with a `STUDY`."""

import importlib

from lab.design import Design

_FILES = (
    *("noise", "budgets", "rates", "exchange", "ablations", "rivals", "block_size", "scaling", "depth_width"),
    *("dynamics", "growth", "nanogpt", "memorised", "depth_tasks", "retrofit", "resnet"),
)
_DESIGNS: list[Design] = [importlib.import_module(f"lab.studies.{name}").STUDY for name in _FILES]
STUDIES = {design.name: design for design in _DESIGNS}
"""In the order in which to run them: the first ones measure the noise for the others' differences."""
