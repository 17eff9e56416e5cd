"""The data of a run: prepared once, read in the same order by every variant, and recorded for later comparison."""

import hashlib
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attnres.training.config import DataConfig, tokenizer_or_default
from attnres.training.parallel import Processes

if TYPE_CHECKING:
    from attnres.data import Batches, Prepared


def prepare_from(data: DataConfig, *, progress: bool = True) -> "Prepared":
    """Return the prepared data of a configuration, tokenised now or found in the cache."""
    from attnres.data import prepare
    from attnres.data.stream import HEAD, refuse_prepared

    if data.stream:
        refuse_prepared(data.source)
    return prepare(
        data.source,
        tokenizer_or_default(data),
        held_out=data.held_out,
        limit=HEAD if data.stream and data.limit is None else data.limit,
        column=data.column,
        progress=progress,
    )


def held_out(prepared: "Prepared", data: DataConfig) -> Tensor:
    """Return the validation windows of every run with this configuration: (count, seq_len + 1) int64."""
    from attnres.data import held_out_windows

    return held_out_windows(prepared.tokens("val"), data.seq_len, data.val_windows)


def open_data(
    data: DataConfig, who: Processes, *, batch_size: int, seed: int, progress: bool
) -> tuple["Prepared", "Batches", Tensor]:
    """Return the prepared data, the batches and the held-out windows; the first process prepares, the others wait.

    Raises:
        UserError: raised on the first process; the others exit.
    """
    from attnres.data import Batches
    from attnres.data.stream import HEAD, StreamedBatches, StreamedTokens

    prepared = None
    for turn in (True, False):
        with who.alike():
            if who.first is turn:
                prepared = prepare_from(data, progress=progress and who.first)
    assert prepared is not None
    sizes = {"seq_len": data.seq_len, "batch_size": batch_size, "seed": seed}
    with who.alike():
        if data.stream:
            limit = HEAD if data.limit is None else data.limit
            stream = StreamedTokens(prepared, data.source, column=data.column, held_out=data.held_out, limit=limit)
            batches: Batches = StreamedBatches(stream, **sizes)
        else:
            batches = Batches(prepared.tokens("train"), **sizes)
        windows = held_out(prepared, data)
    return prepared, batches, windows


def data_record(prepared: "Prepared", windows: Tensor) -> dict[str, Any]:
    """Return the content of data.json, equal for runs on the same data.

    {"tokenizer_sha256", "vocab_size", "splits": {name: {"tokens", "documents", "files" with checksums, ...}},
    "windows_sha256": of the held-out windows}
    """
    names = ("tokenizer_sha256", "vocab_size", "splits")
    digest = hashlib.sha256(windows.numpy().astype("<i8").tobytes()).hexdigest()
    return {**{name: prepared.header[name] for name in names}, "windows_sha256": digest}
