"""The devices that depth reads run on: the table of their kernels, and the choice of a device by name."""

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch

from attnres.errors import UserError
from attnres.ops import cpu, gpu
from attnres.ops.backend import KERNELS, Kernels

# a kernel for another device is a folder and a row here
KERNELS.update((row.device, row) for row in (cpu.KERNELS, gpu.KERNELS))


def accelerator() -> Kernels | None:
    """Return the row of the first kind of device, other than the CPU, that this machine has; None without one."""
    return next((row for row in KERNELS.values() if not row.host and row.devices()), None)


def is_host(device: torch.device) -> bool:
    """Return whether tensors on this device lie in the process's memory and are computed by its threads."""
    return device.type in KERNELS and KERNELS[device.type].host


def forked_generators(devices: Iterable[torch.device]) -> AbstractContextManager[None]:
    """Restore the random generators of the CPU and of these devices (all of one type) after the block."""
    others = {device for device in devices if device.type in KERNELS and not is_host(device)}
    return torch.random.fork_rng(others, device_type=next((device.type for device in others), "cuda"))


def pick_device(name: str) -> torch.device:
    """Return the device with this name; `auto` is an accelerator if there is one, else the CPU.

    Raises:
        UserError: no such device, or PyTorch does not find it.
    """
    if name == "auto":
        default = accelerator()
        return torch.device("cpu" if default is None else default.device)
    *names, last = "auto", *KERNELS
    expected = f"expected {', '.join(names)} or {last}"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"device {name} does not exist: {expected}") from error
    if device.type not in KERNELS:
        raise UserError(f"device {name} is not supported by depth reads: {expected}")
    row = KERNELS[device.type]
    if not row.host and not row.devices():
        raise UserError(f"device {name} was asked for, but {row.missing()}: use --device cpu")
    if not row.host and (device.index or 0) >= len(row.devices()):
        raise UserError(f"device {name} does not exist: the last one here is {row.devices()[-1]}")
    return device
