"""Chooses the device that a model runs on, says its autocast, and counts the cores there are."""

import os

import torch

from attnres.errors import UserError


def pick_device(name: str) -> torch.device:
    """The device of a name: `auto` is CUDA where there is one, else the CPU.

    Raises:
        UserError: no such device, or CUDA where PyTorch finds none.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"device {name} does not exist: expected auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device {name} is none that depth reads run on: expected auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {name} was asked for, but PyTorch finds no CUDA device here: use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {name} does not exist: the last one here is cuda:{torch.cuda.device_count() - 1}")
    return device


def autocast_dtype(kind: str) -> torch.dtype | None:
    """Return the dtype of autocast on a kind of device ("cpu", "cuda"); None where it is off, or unknown ("meta")."""
    is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_on else None


def cores() -> int:
    """How many of the processor's cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
