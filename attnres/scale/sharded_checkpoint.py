"""Sharded checkpoints: one flat dict of named tensors, which any layout of processes writes and any other reads.

torch's distributed checkpoint writes what each rank has and reads the parts that a rank asks for, whole tensors or
shards of any mesh. Names are those of the unsharded model, so nothing has to be translated.
"""

import pickle
import warnings
import zlib
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from attnres.errors import UserError, first_line
from attnres.scale.process_group import is_loss

PIECE = 1 << 20
DESCRIPTION = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("Path", "PosixPath", "PurePosixPath"),
    "pathlib._local": ("Path", "PosixPath", "PurePosixPath"),
    "torch": ("Size",),
}
"""The names in torch's description of a checkpoint, a pickle, by module, besides torch's dtypes: any other could run
code."""


class _Description(pickle.Unpickler):
    """Reads a checkpoint's description and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if not is_dtype and name not in DESCRIPTION.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place there and is not run")
        return super().find_class(module, name)


class _CheckedReader(FileSystemReader):
    """torch's reader, with a check of the checkpoint's description before torch runs the code that it names."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            _Description(file).load()
        return super().read_metadata(*args, **kwargs)


def save_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write this rank's part of `tensors` into `folder`, which is the same on all ranks; the metadata come last.

    Raises:
        UserError: a rank could not write, on every rank.
        RuntimeError: a rank was lost.
    """
    try:
        dcp.save(dict(tensors), storage_writer=FileSystemWriter(folder, sync_files=True))
    except (OSError, RuntimeError, dcp.api.CheckpointException) as error:
        if is_loss(error):
            raise RuntimeError("a process was lost while a checkpoint was written") from error
        raise UserError(f"cannot write the checkpoint in {folder.parent}: {_cause(error)}") from error


def begin_shards(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup) -> "Future[None]":
    """Start `save_shards` in the background, from copies: tensors may change once this returns.

    Args:
        group: a group of all ranks on the CPU for the messages of saving, beside the run's.

    Returns:
        A future that is done when every rank has written (on the first rank) or this one has; `result` raises
        UserError.
    """
    done: Future[None] = Future()

    def end(saving: Any) -> None:
        try:
            saving.result()
        except (OSError, RuntimeError, dcp.api.CheckpointException) as error:
            refusal = UserError(f"cannot write the checkpoint in {folder.parent}: {_cause(error)}")
            refusal.__cause__ = error
            done.set_exception(refusal)
        else:
            done.set_result(None)

    writer = FileSystemWriter(folder, sync_files=True)
    saving: Any = dcp.async_save(dict(tensors), storage_writer=writer, process_group=group)
    saving.add_done_callback(end)
    return done


def shapes_in(folder: Path) -> dict[str, torch.Size]:
    """Return the shape of every tensor in a checkpoint. Raises UserError for one that is unfinished."""
    try:
        described = _CheckedReader(folder).read_metadata().state_dict_metadata
    except (OSError, EOFError, ValueError, AttributeError, ImportError, pickle.UnpicklingError) as error:
        raise UserError(f"{folder} is no finished sharded checkpoint ({first_line(error)})") from error
    return {name: value.size for name, value in described.items() if isinstance(value, TensorStorageMetadata)}


def load_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Load `tensors`, in place, from a checkpoint; each rank reads what it needs. Raises UserError."""
    shapes = shapes_in(folder)
    for name, tensor in tensors.items():
        if name not in shapes:
            raise UserError(f"the checkpoint {folder} has no '{name}': it is of another model")
        if shapes[name] != tensor.shape:
            raise UserError(
                f"'{name}' in the checkpoint {folder} has shape {tuple(shapes[name])}, not {tuple(tensor.shape)}: it "
                "is of another model"
            )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # in one process
            dcp.load(dict(tensors), storage_reader=_CheckedReader(folder), no_dist=not dist.is_initialized())
    except (OSError, RuntimeError, ValueError, EOFError, dcp.api.CheckpointException) as error:
        raise UserError(f"cannot read the checkpoint {folder}: {_cause(error)}") from error


def file_sums(folder: Path) -> dict[str, int]:
    """Return the CRC-32 of every file of a checkpoint by name."""
    return {file.name: _crc32(file) for file in sorted(folder.iterdir())}


def check_files(folder: Path, sums: Mapping[str, int]) -> None:
    """Raise UserError unless the files of a checkpoint are those that were written."""
    for name, value in sums.items():
        file = folder / name
        if not file.is_file():
            raise UserError(f"{file} is missing: the checkpoint is damaged; remove its folder to start again")
        if _crc32(file) != value:
            raise UserError(
                f"{file} is not what was saved: the checkpoint is damaged; remove its folder to start again"
            )


def _crc32(file: Path) -> int:
    value = 0
    with file.open("rb") as handle:
        while piece := handle.read(PIECE):
            value = zlib.crc32(piece, value)
    return value


def _cause(error: BaseException) -> str:
    """Return the first failure of a rank inside a CheckpointException, in a line."""
    failures = getattr(error, "failures", None) or {}
    return next((first_line(wrapped[0]) for wrapped in failures.values()), first_line(error))
