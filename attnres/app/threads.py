"""How many threads the models of a page run on."""

import time
from collections.abc import Sequence

import torch

from attnres.app.explorer import Opened

TRIAL = 128
"""Tokens of the passes that settle the number of threads."""


def choose_threads(models: Sequence[Opened]) -> None:
    """One thread instead of torch's own number where a pass is faster so: a small model's steps are short, and on a
    machine with other work threads wait for one another longer than that. Measured here, kept while the process runs.
    """
    most = torch.get_num_threads()
    if most == 1 or any(model.model.device.type != "cpu" for model in models):
        return
    times = {}
    for threads in (1, most):
        torch.set_num_threads(threads)
        for _ in range(2):  # the first pass builds kernels and fills caches
            start = time.perf_counter()
            for model in models:
                model.read_ids((0,) * min(TRIAL, model.context), [], [])
            times[threads] = time.perf_counter() - start
    torch.set_num_threads(min(times, key=lambda threads: times[threads]))
