"""The data of a run: prepared once, read alike by every variant, and written down so that it can be recognised."""

import hashlib
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attnres.train.config import DataConfig

if TYPE_CHECKING:
    from attnres.data import Prepared


def prepare_from(data: DataConfig, *, progress: bool = True) -> "Prepared":
    """The tokens that a configuration asks for: made, or found where they were made before."""
    from attnres.data import prepare

    return prepare(
        data.source,
        data.tokenizer,
        held_out=data.held_out,
        limit=data.limit,
        column=data.column,
        progress=progress,
    )


def held_out(prepared: "Prepared", data: DataConfig) -> Tensor:
    """The windows on which every run with this configuration is validated: (count, seq_len + 1) int64."""
    from attnres.data import held_out_windows

    return held_out_windows(prepared.tokens("val"), data.seq_len, data.val_windows)


def data_record(prepared: "Prepared", windows: Tensor) -> dict[str, Any]:
    """The content of data.json, equal for runs on the same data.

    {"tokenizer_sha256", "vocab_size", "splits": {name: {"tokens", "documents", "files" with checksums, ...}},
    "windows_sha256": of the held-out windows}
    """
    names = ("tokenizer_sha256", "vocab_size", "splits")
    digest = hashlib.sha256(windows.numpy().astype("<i8").tobytes()).hexdigest()
    return {**{name: prepared.header[name] for name in names}, "windows_sha256": digest}
