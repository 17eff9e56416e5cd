"""The files of a model's weights: which they are, what is in them, and whether they are whole. No weight is read."""

import contextlib
import functools
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch
from safetensors import SafetensorError, safe_open

from attnres.errors import UserError
from attnres.reading import read_json
from attnres.typed import checked

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
AGAIN = "fetch or copy it again"

_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_SAMPLES, _SAMPLE = 4096, 4096
"""Pieces of a file, and their bytes, by which it is told from others; a smaller file is taken whole."""
_PICKLE = "a pickle, which can run code and is not opened: save it as safetensors first"
_OTHERS = {
    **dict.fromkeys(("*.bin", "*.pt", "*.pth", "*.ckpt"), _PICKLE),
    "*.gguf": "a GGUF file, which llama.cpp reads: give the safetensors that it was made from",
}
"""Files of weights that are not opened, with what to do."""
_LONGEST = 200
"""Characters of a file's name: systems take 255 bytes."""


class Index(TypedDict):
    """What says which files hold the weights."""

    weight_map: dict[str, str]


@dataclass(frozen=True)
class WeightFiles:
    """Those of the model that a user calls `model`, in `folder`."""

    model: str
    folder: Path

    @functools.cached_property
    def paths(self) -> list[Path]:
        """The safetensors that the index names, or the single one.

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
        if (other := other_weights(self.folder)) is not None:
            raise UserError(f"{self.model} has its weights in {other}")
        raise UserError(f"{self.model} has a config.json and holds no weights: expected {SINGLE} or {INDEX}")

    @property
    def parameters(self) -> int:
        """How many numbers they hold."""
        return sum(size for _, size, _ in self._tensors())

    def nbytes(self, itemsize: int | None = None) -> int:
        """Bytes of the weights, as they are stored or with `itemsize` bytes each."""
        return sum(size * (itemsize or _BYTES.get(dtype, 8)) for _, size, dtype in self._tensors())

    def check(self) -> None:
        """Refuse with a UserError files that are cut short, and weights in fewer than 16 bits."""
        for name, _, dtype in self._tensors():
            # Integers and booleans may be buffers (masks, ids); as weights they are quantised, as the config says.
            if dtype.startswith("F") and dtype not in _BYTES:
                raise UserError(
                    f"'{name}' of {self.model} has dtype {dtype}: expected {', '.join(_BYTES)}; save a dequantised "
                    "copy first"
                )

    def digest(self) -> bytes:
        """Return a hash that differs where the weights do: of samples of each file, and of the residual's tensors
        whole, which may be all that was trained and are small."""
        state = hashlib.sha256()
        for path in self.paths:
            size = path.stat().st_size
            state.update(b"%d " % size)
            with path.open("rb") as file:
                for i in range(min(_SAMPLES, -(-size // _SAMPLE))):
                    file.seek(max(i * _SAMPLE, (size - _SAMPLE) * i // (_SAMPLES - 1)))
                    state.update(file.read(_SAMPLE))
            with contextlib.suppress(SafetensorError), safe_open(path, framework="pt") as tensors:  # damaged: no more
                for name in sorted(tensors.keys()):
                    if "residual" in name and math.prod(tensors.get_slice(name).get_shape()) < _SAMPLES * _SAMPLE:
                        state.update(tensors.get_tensor(name).reshape(-1).view(torch.uint8).numpy().tobytes())
        return state.digest()

    def _tensors(self) -> Iterator[tuple[str, int, str]]:
        """Name, number of elements and dtype of each tensor. Raises UserError for a file that is cut short."""
        for path in self.paths:
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118
                        part = file.get_slice(name)
                        yield name, math.prod(part.get_shape()), part.get_dtype()
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path.name} of {self.model} is damaged or cut short ({error}): {AGAIN}") from error


def other_weights(path: Path) -> str | None:
    """Return a file of weights that is no safetensors, `path` or in the folder `path`, with what it is and what to do;
    None without."""
    for pattern, what in _OTHERS.items():
        files = [path] if path.is_file() and path.match(pattern) else sorted(path.glob(pattern))
        if files:
            return f"{files[0].name}, {what}"
    return None


def weight_names(folder: Path) -> list[str]:
    """Names of the files that hold a model's weights: those in its index, or the one that is there without.

    Raises:
        UserError: an index that names none, files that lie in another folder, or that are no safetensors.
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
