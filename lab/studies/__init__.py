"""The laboratory's studies, one a file, each with a `STUDY`."""

from lab.design import Design
from lab.studies import (
    ablations,
    block_size,
    budgets,
    depth_tasks,
    depth_width,
    dynamics,
    exchange,
    growth,
    memorised,
    nanogpt,
    noise,
    rates,
    resnet,
    retrofit,
    rivals,
    scaling,
)

_FILES = (
    *(noise, budgets, rates, exchange, ablations, rivals, block_size, scaling, depth_width, dynamics, growth, nanogpt),
    *(memorised, depth_tasks, retrofit, resnet),
)
STUDIES: dict[str, Design] = {file.STUDY.name: file.STUDY for file in _FILES}
"""In the order in which to run them: the first ones say what the others' differences are worth."""
