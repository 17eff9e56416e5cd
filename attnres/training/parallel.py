"""The processes of a run: one, or several under `torchrun`, each with its part of every batch."""

import atexit
import gc
import json
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from attnres.errors import Interrupted, UserError, first_line
from attnres.ops.devices import is_host, pick_device
from attnres.scale.process_group import fresh_store, is_loss

PATIENCE = timedelta(hours=2)
"""How long a process waits for the others: the first one may be tokenising the corpus."""
JOINING = timedelta(seconds=10)
"""How long a process waits for torchrun, which was running when it started the process."""


@dataclass(frozen=True)
class Processes:
    """This process among the `world_size` processes of the run."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Return whether this process writes files and prints messages."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum `values` over the processes, in place, and return them; the result is identical on all, so that all
        decide alike."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def wait(self) -> None:
        """Wait until every process has reached this point."""
        if self.world_size > 1:
            dist.barrier()

    def gather(self, value: Any) -> list[Any]:
        """Return every process's JSON value, in order of rank."""
        if self.world_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, json.dumps(value))
        return [json.loads(text) for text in gathered]

    def share(self, value: Any) -> Any:
        """Return the first process's JSON value on all processes."""
        return self.gather(value)[0]

    def of_first(self, make: Callable[[], Any]) -> Any:
        """Return the JSON value that `make` returns on the first process. A UserError there ends all of them: the first
        raises it, the others exit with status 2."""
        with self.alike():
            value = make() if self.first else None
        return self.share(value)

    @contextmanager
    def alike(self) -> Generator[None]:
        """Let a UserError of any process inside the block end all of them: the first raises it, the others exit with
        status 2. The block must not communicate."""
        refusal = None
        try:
            yield
        except UserError as error:
            if self.world_size == 1:
                raise
            refusal = error
        if self.world_size == 1:
            return
        refusals = [text for text in self.gather(refusal and str(refusal)) if text]
        if refusals and self.first:
            raise refusal or UserError(refusals[0])
        if refusals:
            raise SystemExit(2)

    def same(self, end: UserError | Interrupted) -> BaseException:
        """Return the exception with which a process ends for a common reason: the error itself on the first, an exit
        with its status on the others."""
        return end if self.first else SystemExit(end.code if isinstance(end, Interrupted) else 2)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return `model` with gradients averaged over the processes in each backward (DDP); unchanged for one
        process."""
        if self.world_size == 1:
            return model
        devices = [self.device] if not is_host(self.device) else None
        return nn.parallel.DistributedDataParallel(model, device_ids=devices)


@contextmanager
def losses_said(who: Processes, where: str) -> Generator[None]:
    """End this process if another one is lost inside the block; one of the remaining processes prints that.

    Args:
        where: the part of the message that says how to continue.

    Raises:
        UserError: another process was lost; raised on the first process that notices.
        SystemExit: the same on the others, with status 2.
    """
    try:
        yield
    except BaseException as error:
        if who.world_size == 1 or isinstance(error, UserError | SystemExit) or not is_loss(error):
            raise
        if not _first_to_notice():
            raise SystemExit(2) from None
        raise UserError(
            f"another process of the run was lost, so process {who.rank} of {who.world_size} ends too: {where}"
        ) from error


def _first_to_notice() -> bool:
    """Return whether this process is the first of this start to ask; True if torchrun's store cannot be reached."""
    try:
        port = int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False, timeout=timedelta(seconds=5))
        return store.add(f"attnres/lost/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", 1) == 1
    except (KeyError, ValueError, RuntimeError):
        return True


def _leave() -> None:
    """Destroy the process group before the interpreter ends: a gloo thread that frees a Python tensor later would
    abort.

    The group's threads are joined when its last reference is dropped, and a wrapped model holds one, in a cycle. The
    last reference has to be Python's, which is dropped without the interpreter lock. A model's would be dropped with
    the lock held, and would wait for ever for a thread that needs the lock to free a tensor.
    """
    group = dist.group.WORLD
    dist.destroy_process_group()
    gc.collect()
    del group


def _meet() -> tuple[dist.Store, int]:
    """Return the store through which the processes of this start find one another, and this process's rank.

    Raises:
        UserError: torchrun, which hosts the store, was lost; on the others SystemExit.
    """
    launched = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store, rank, _ = next(dist.rendezvous("env://", timeout=JOINING if launched else PATIENCE))
    except dist.DistNetworkError as error:
        if os.environ.get("RANK") != "0":
            raise SystemExit(2) from None
        raise UserError(
            f"no process answers at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}, the address of "
            "this run's store: torchrun was lost, start it again"
        ) from error
    store.set_timeout(PATIENCE)
    return store, rank


def join_processes(device: str = "auto") -> Processes:
    """Return the processes that `torchrun` started, with PyTorch's default backend for the device (gloo on the CPU,
    nccl on CUDA); without torchrun, one process.

    The group lasts until the process ends, because a second one cannot be made from the same store; an existing group
    is used. Raises UserError for a missing device, or for one that several processes would share.
    """
    picked = pick_device(device)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if not is_host(picked):
        if picked.index is not None and world_size > 1:
            if os.environ.get("RANK") != "0":
                raise SystemExit(2)
            raise UserError(
                f"device {device} is one GPU and torchrun started {world_size} processes: give {picked.type}, each "
                "takes its own"
            )
        if picked.index is None:
            picked = torch.device(picked.type, int(os.environ.get("LOCAL_RANK", "0")))
        try:
            torch.get_device_module(picked).set_device(picked)
        except RuntimeError as error:
            raise UserError(
                f"device {device} cannot be used ({first_line(error)}): try {picked.type}, {picked.type}:0 or cpu"
            ) from error
    if world_size > 1 and not dist.is_initialized():
        store, rank = _meet()
        dist.init_process_group(
            dist.get_default_backend_for_device(picked),
            store=fresh_store(store, rank, world_size, PATIENCE.total_seconds()),
            rank=rank,
            world_size=world_size,
            timeout=PATIENCE,
            device_id=None if is_host(picked) else picked,
        )
        atexit.register(_leave)
    if dist.is_initialized():
        return Processes(dist.get_rank(), dist.get_world_size(), picked)
    return Processes(0, 1, picked)
