"""What decides the last bits of a run besides its configuration: a resumed run keeps it, or says what differs."""

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

import attnres
from attnres.errors import UserError
from attnres.ops import cpu, explain
from attnres.text import listed
from attnres.training.environment import processor, version
from attnres.training.parallel import Processes
from attnres.training.records import Arithmetic

_NAMES = {
    "device": "the device",
    "threads": "the number of threads",
    "reads": "the backend of depth reads",
    "kernels": "the build of the C kernels",
    "loss": "how the loss is made",
}


def arithmetic(who: Processes, width: int, loss: str | None) -> Arithmetic:
    """What this process computes with, for depth reads of vectors of `width`; `loss` is how the loss is made where that
    depends on what is installed, None where it was asked for."""
    backend = explain([torch.zeros(1, width, device=who.device)]).backend
    here: Arithmetic = {
        "device": torch.cuda.get_device_name(who.device) if who.device.type == "cuda" else _processor(),
        "reads": backend,
        "kernels": cpu.version() if backend == "cpu" else None,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "attnres": attnres.__version__,
    }
    if loss is not None:
        here["loss"] = loss
    return {**here, "threads": torch.get_num_threads()} if who.device.type == "cpu" else here


@contextmanager
def restored(
    recorded: Mapping[str, Any], who: Processes, width: int, loss: str | None, *, different: bool
) -> Generator[None]:
    """Compute as `recorded` says inside the block: its number of threads, its C kernels or plain torch.

    Args:
        recorded: an `Arithmetic`; what a checkpoint of an earlier version does not have is not kept.
        width, loss: as for `arithmetic`.
        different: go on where something else differs, instead of refusing.

    Raises:
        UserError: what differs cannot be kept, by name.
    """
    with ExitStack() as stack:
        if who.device.type == "cpu":
            if threads := recorded.get("threads"):
                stack.callback(torch.set_num_threads, torch.get_num_threads())
                torch.set_num_threads(threads)
            if recorded.get("reads") in ("cpu", "eager"):
                stack.enter_context(cpu.switched(recorded["reads"] == "cpu"))
        here: dict[str, Any] = {**arithmetic(who, width, loss)}
        other = [name for name in recorded if name in here and here[name] != recorded[name]]
        if other and not different:
            pairs = [f"{_NAMES.get(name, name)} ({recorded[name]} there, {here[name]} here)" for name in other]
            raise UserError(
                f"the run would not go on bit for bit, for it was trained with other arithmetic: {listed(pairs)}; "
                "resume it where these are the same, or give --allow-different"
            )
        yield


def _processor() -> str:
    """Its name without the number of its cores, which changes no result, and the instructions that torch uses."""
    return f"{processor().rpartition(', ')[0]} ({torch.backends.cpu.get_cpu_capability()})"
