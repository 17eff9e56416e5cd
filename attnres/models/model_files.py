"""The files of a model: its folder, its weights, and the snapshots of a run. No weight is loaded and no code is run.

A snapshot, RUN/residual/STEP.safetensors, holds the parameters and buffers of a run's residual at an evaluation, under
their names in it. Snapshots are small compared with the model (a read has a query and a gain), so a run keeps all of
them. They show queries over training; contributions to the reads of a text need all weights of a step, that is a
checkpoint (`keep_at`).
"""

import contextlib
import functools
import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from attnres.data.tokenizer import TOKENIZER_FILES
from attnres.errors import UserError, foreign
from attnres.files import by_step, refuse_special, user_path, write_bytes
from attnres.folders import kind_of
from attnres.hub import fetch, is_hub_name
from attnres.models.foreign import formats_of
from attnres.reading import read_json
from attnres.residuals import Residual
from attnres.typed import checked

EXAMPLE = Path(__file__).parents[1] / "example"
"""The trained model that comes with the package."""
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
AGAIN = "fetch or copy it again"

_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_SAMPLES, _SAMPLE = 4096, 4096
"""Number of samples of a file, and their bytes, that are hashed to identify it; a smaller file is hashed whole."""
_PICKLE = "a pickle, which can run code and is not opened: save it as safetensors first"
_OTHERS = {
    **dict.fromkeys(("*.bin", "*.pt", "*.pth", "*.ckpt"), _PICKLE),
    "*.gguf": "a GGUF file, which llama.cpp reads: give the safetensors that it was made from",
}
"""Formats of weight files that are not opened -> what to do."""
_LONGEST = 200
"""Longest accepted file name, in characters; systems allow 255 bytes."""


class Index(TypedDict):
    """The index that maps tensors to files of weights."""

    weight_map: dict[str, str]


@dataclass(frozen=True)
class WeightFiles:
    """The weight files in `folder` of the model that a user calls `model`."""

    model: str
    folder: Path

    @functools.cached_property
    def paths(self) -> list[Path]:
        """Return the safetensors files that the index names, or the single one.

        Raises:
            UserError: there are none, or one that the index names is missing.
        """
        files = [self.folder / name for name in weight_names(self.folder)]
        missing = [file.name for file in files if not file.is_file()]
        if not missing:
            return files
        if (self.folder / INDEX).is_file():
            raise UserError(
                f"{self.model} lacks {missing[0]}, {len(missing)} of the {len(files)} files that {INDEX} names: {AGAIN}"
            )
        if (unsupported := other_weights(self.folder)) is not None:
            raise UserError(f"{self.model} has its weights in {unsupported}")
        raise UserError(f"{self.model} has a config.json and holds no weights: expected {SINGLE} or {INDEX}")

    @property
    def parameters(self) -> int:
        """Return the number of values in the files."""
        return sum(size for _, size, _ in self._tensors())

    def nbytes(self, itemsize: int | None = None) -> int:
        """Return the bytes of the weights, as stored or with `itemsize` bytes a value."""
        return sum(size * (itemsize or _BYTES.get(dtype, 8)) for _, size, dtype in self._tensors())

    def check(self) -> None:
        """Refuse with a UserError truncated files, and weights in fewer than 16 bits."""
        for name, _, dtype in self._tensors():
            # Integers and booleans may be buffers (masks, ids); as weights they are quantised, which the config says.
            if dtype.startswith("F") and dtype not in _BYTES:
                raise UserError(
                    f"'{name}' of {self.model} has dtype {dtype}: expected {', '.join(_BYTES)}; save a dequantised "
                    "copy first"
                )

    def digest(self) -> bytes:
        """Return a hash that changes with the weights: of samples of each file, and of all of the residual's tensors,
        which are small and may be all that was trained."""
        state = hashlib.sha256()
        for path in self.paths:
            size = path.stat().st_size
            state.update(b"%d " % size)
            with path.open("rb") as file:
                for i in range(min(_SAMPLES, -(-size // _SAMPLE))):
                    file.seek(max(i * _SAMPLE, (size - _SAMPLE) * i // (_SAMPLES - 1)))
                    state.update(file.read(_SAMPLE))
            # a damaged file is not read further
            with contextlib.suppress(SafetensorError), safe_open(path, framework="pt") as tensors:
                for name in sorted(tensors.keys()):
                    if "residual" in name and math.prod(tensors.get_slice(name).get_shape()) < _SAMPLES * _SAMPLE:
                        state.update(tensors.get_tensor(name).reshape(-1).view(torch.uint8).numpy().tobytes())
        return state.digest()

    def _tensors(self) -> Iterator[tuple[str, int, str]]:
        """Yield the name, number of elements and dtype of each tensor. Raises UserError for a truncated file."""
        for path in self.paths:
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118
                        part = file.get_slice(name)
                        yield name, math.prod(part.get_shape()), part.get_dtype()
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path.name} of {self.model} is damaged or cut short ({error}): {AGAIN}") from error


def other_weights(path: Path) -> str | None:
    """Return the path of a weight file that is no safetensors, at `path` or in the folder `path`, with its kind and
    what to do; None if there is none."""
    for pattern, what in _OTHERS.items():
        files = [path] if path.is_file() and path.match(pattern) else sorted(path.glob(pattern))
        if files:
            return f"{files[0].name}, {what}"
    return None


def weight_names(folder: Path) -> list[str]:
    """Return the names of the files that hold a model's weights: those in its index, or the single file without an
    index.

    Raises:
        UserError: the index names no file, a file in another folder, or one that is no safetensors.
    """
    if not (folder / INDEX).is_file():
        return [SINGLE]
    index = checked(read_json(folder / INDEX, ours=False), Index, folder / INDEX, AGAIN)
    names = sorted(set(index["weight_map"].values()))
    if not names:
        raise UserError(f"{INDEX} in {folder} names no files: {AGAIN}")
    if strange := [name for name in names if name != Path(name).name or len(name) > _LONGEST]:
        raise UserError(f"{INDEX} in {folder} names '{strange[0][:80]}', which is no file beside it: {AGAIN}")
    if others := [name for name in names if not name.endswith(".safetensors")]:
        raise UserError(
            f"{INDEX} in {folder} names '{others[0]}': expected .safetensors alone, since other files of weights are "
            "pickles, which can run code and are not opened; save the model as safetensors"
        )
    return names


BESIDE = (*TOKENIZER_FILES, "chat_template*", "generation_config.json", "LICENSE*")
"""Patterns of files that are copied along with a model."""
ADAPTER = "adapter_config.json"
"""File by which PEFT, and Transformers when it loads a model, recognise the folder of an adapter."""


class Fields(TypedDict, total=False):
    """The fields of config.json that are used before Transformers makes a config of it."""

    model_type: str | None
    auto_map: dict[str, Any] | None
    quantization_config: dict[str, Any] | None
    residual: str
    residual_settings: dict[str, Any] | None
    residual_file: str | None
    residual_sha256: str | None
    residual_family: dict[str, Any] | None
    transformers_weights: str | None


def place_of(name: str, *, code: bool) -> tuple[Path, Path | None]:
    """Return the folder of a model, and the run folder that it belongs to or None.

    Args:
        code: also fetch Python files of a model on the hub.

    Raises:
        UserError: nothing is there, the run is unfinished, or there is no config.json of a model.
    """
    path = _path(name)
    if _is_remote(name, path):
        return _fetched(name, code=code), None
    folder, run = _on_disk(name, path)
    _refuse_adapter(name, folder)
    return folder, run


def config_place(name: str) -> Path:
    """Return the folder of a model for which config.json suffices; nothing else is fetched. Raises UserError."""
    path = _path(name)
    if _is_remote(name, path):
        return _described(name, ["config.json"])
    inner = path / "model"
    return inner if (inner / "config.json").is_file() else _on_disk(name, path)[0]


def _path(name: str) -> Path:
    """Return the path of a model on the disk: the package's own for "example", unless the user has a folder of that
    name."""
    path = user_path(name)
    return EXAMPLE if name == "example" and not path.exists() else path


def _is_remote(name: str, path: Path) -> bool:
    return not path.exists() and is_hub_name(name)


def _on_disk(name: str, path: Path) -> tuple[Path, Path | None]:
    if not path.exists():
        raise UserError(f"model '{name}' does not exist: expected a run folder, a model folder or a name on the hub")
    inner = path / "model"
    if (path / "shares").is_dir() and (path / "state.json").is_file():
        raise UserError(
            f"{name} is a sharded checkpoint, which attnres train --resume reads: let the run finish, or "
            f"write its model as it is with attnres export {name} OUT --weights"
        )
    if (inner / "config.json").is_file() and (path / "state.json").is_file():
        if (path / "adapter.safetensors").is_file():
            raise UserError(f"{name} has LoRA's tensors beside its model, which are merged when the run is finished")
        return inner, path.parent
    if (inner / "config.json").is_file():
        return inner, path
    checkpoint = path / "checkpoint"
    if checkpoint.is_dir() or (path.is_dir() and kind_of(path) == "run"):
        saved = f", or give {checkpoint}" if checkpoint.is_dir() else ""
        raise UserError(f"the run in {name} is not finished and has no model yet: continue it with --resume{saved}")
    if not (path / "config.json").is_file():
        _refuse_adapter(name, path)
        raise UserError(f"{name} holds no model: {_what_else(path)}")
    is_of_run = path.name == "model" and (path.parent / "metrics.jsonl").is_file()
    return path, path.parent if is_of_run else None


def _refuse_adapter(name: str, folder: Path) -> None:
    """Refuse with a UserError the folder of an adapter: Transformers would add an adapter beside a model to it, also
    from a pickle."""
    if (folder / ADAPTER).is_file():
        raise UserError(
            f"{name} holds {ADAPTER}, a PEFT adapter (LoRA, say), which changes another model: give that model, or "
            "merge the adapter into it first (PEFT's merge_and_unload, then save_pretrained into a folder of its own)"
        )


def _what_else(path: Path) -> str:
    """Return the end of a sentence that says what lies in a folder without config.json, and what to give instead."""
    expected = "expected a run folder, or a folder with config.json and safetensors"
    # A cache of the hub (models--OWNER--NAME), what Transformers' Trainer wrote (checkpoint-500), a folder of runs.
    inner = [file.parent for pattern in ("snapshots/*", "*") for file in path.glob(f"{pattern}/config.json")]
    if inner:
        return f"{expected}, such as {max(inner, key=lambda folder: folder.stat().st_mtime)} in it"
    other = other_weights(path)
    return expected if other is None else f"it {'is' if path.is_file() else 'has'} {other}"


def fields_of(name: str, folder: Path) -> dict[str, Any]:
    """Read config.json of a model. Raises UserError."""
    fields = dict(checked(read_json(folder / "config.json", ours=False), Fields, folder / "config.json", AGAIN))
    if not (fields.get("model_type") or fields.get("auto_map") or formats_of(fields)):
        raise UserError(f"config.json of {name} is not that of a model: it names no model_type")
    if (weights := fields.get("transformers_weights")) not in (None, SINGLE, INDEX):
        raise UserError(
            f"config.json of {name} says transformers_weights={str(weights)[:80]!r}: expected {SINGLE} or {INDEX}; "
            "rename the files, and remove that line"
        )
    return fields


@functools.cache
def _fetched(name: str, *, code: bool) -> Path:
    """Fetch a model from the hub and return its folder; the index is fetched first, because it names the weight
    files."""
    folder = _described(name, [*BESIDE, "config.json", INDEX, *(["*.py"] if code else [])])
    return fetch(name, weight_names(folder))


def _described(name: str, patterns: list[str]) -> Path:
    """Fetch files of a model on the hub, with config.json. Raises UserError if it has none, or is an adapter."""
    folder = fetch(name, [*patterns, ADAPTER])
    _refuse_adapter(name, folder)
    if not (folder / "config.json").is_file():
        raise UserError(f"{name} on the hub holds no model: it has no config.json")
    return folder


LIGHT = 16 * 2**20
"""Most bytes of a snapshot: a residual with larger parameters (a matrix for each read) is stored in checkpoints
only."""
_ADVICE = "remove it: the run and its other snapshots do not need it"


def tensors_of(residual: Residual) -> dict[str, Tensor]:
    """Return the tensors of a residual that a snapshot holds, by name; empty if it has none or is too large."""
    tensors = residual.state_dict()
    return tensors if sum(tensor.numel() * tensor.itemsize for tensor in tensors.values()) <= LIGHT else {}


def write_snapshot(run: str | Path, step: int, tensors: Mapping[str, Tensor]) -> None:
    """Write a snapshot, whole or not at all. Raises UserError."""
    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    write_bytes(Path(run) / "residual" / f"{step:06d}.safetensors", data)


def snapshots(run: str | Path) -> dict[int, Path]:
    """Return the snapshots of a run, by step, in order."""
    return by_step(Path(run) / "residual", "safetensors")


def residual_at(config: Any, path: Path) -> Residual:
    """Return the residual of a model with this config, loaded from a snapshot.

    Raises:
        UserError: the snapshot is damaged, or of another residual.
    """
    refuse_special(path)
    residual = config.make_residual()
    with foreign(f"{path} cannot be read", _ADVICE):
        tensors = load_file(path)
    if wrong := _misfit(residual.state_dict(), tensors):
        raise UserError(f"{path} is no snapshot of residual '{residual.name}' ({wrong}): {_ADVICE}")
    residual.load_state_dict(tensors)
    return residual.eval()


def _misfit(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> str:
    """Return why tensors do not fit a residual; empty if they do."""
    if expected.keys() != tensors.keys():
        return f"it holds {', '.join(sorted(tensors)) or 'nothing'}, expected {', '.join(sorted(expected))}"
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            return f"{name} is {tuple(tensor.shape)}, expected {tuple(expected[name].shape)}"
        if not tensor.isfinite().all():
            return f"{name} has numbers that are not finite"
    return ""
