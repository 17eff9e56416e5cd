"""Checkpoints on disk or on the hub, looked at before anything is loaded: what is wrong is said in one sentence."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from attnres.errors import UserError, first_line
from attnres.files import read_json
from attnres.models.foreign_kinds import refuse_foreign

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
FLOATS = tuple(_BYTES)
"""Dtypes of weights that can be converted, in safetensors' names."""

KEPT = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "LICENSE*",
)
"""Files beside the weights that a converted model keeps, byte for byte."""

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Source:
    """A checkpoint that was looked at.

    Attributes:
        name: as the user gave it.
        folder: where it lies.
        config: config.json.
        trusted: whether code in it may run.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    trusted: bool

    @property
    def remote(self) -> dict[str, str] | None:
        """Classes that are code in the folder: "AutoConfig", "AutoModelForCausalLM" -> "module.Class"; else None."""
        return self.config.get("auto_map") if self.config.get("model_type") not in CONFIG_MAPPING else None

    def weight_bytes(self, itemsize: int | None = None) -> int:
        """Bytes of the weights on disk; of `itemsize` each, where that is given."""
        total = 0
        for file in weight_files(self):
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118
                    part = tensors.get_slice(key)
                    total += math.prod(part.get_shape()) * (itemsize or _BYTES.get(part.get_dtype(), 8))
        return total

    def kept_files(self) -> Iterator[Path]:
        """Files that go along; Python files only where they were trusted."""
        patterns = (*KEPT, "*.py") if self.trusted and self.remote else KEPT
        yield from sorted({file for pattern in patterns for file in self.folder.glob(pattern) if file.is_file()})


def find(source: str | Path, *, trust_remote_code: bool = False) -> Source:
    """Look at a folder, or fetch a model of the hub and look at that. No weight is loaded, no code is run.

    Raises:
        UserError: nothing there, or what keeps it from being converted.
    """
    found = locate(source, trust_remote_code=trust_remote_code)
    check(found)
    return found


def check(source: Source) -> None:
    """Raises UserError for what keeps a checkpoint that was located from being converted."""
    _check_config(source)
    check_weights(source, weight_files(source))
    _check_tokenizer(source)


def locate(source: str | Path, *, trust_remote_code: bool = False) -> Source:
    """A folder with a config.json, or that of a model of the hub, which is fetched; nothing else is looked at."""
    name, folder = str(source), Path(source).expanduser()
    if not folder.exists() and _HUB_NAME.fullmatch(name):
        folder = _fetched(name, code=trust_remote_code)
    if not (folder / "config.json").is_file():
        raise UserError(f"{name} holds no model: expected a folder with config.json and weights, or a name on the hub")
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise UserError(f"config.json of {name} holds no object: it is damaged, copy it again")
    return Source(name, folder, config, trust_remote_code)


def load_plain(source: Source, dtype: torch.dtype | None) -> tuple[PreTrainedModel, list[str]]:
    """The model, in evaluation mode, and the names of tensors that its class has no use for.

    Args:
        dtype: None keeps that of the file.
    """
    code = source.trusted and source.remote is not None  # Transformers' own class where it has one
    try:
        config = AutoConfig.from_pretrained(source.folder, trust_remote_code=code)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.folder,
            config=config,
            dtype="auto" if dtype is None else dtype,
            use_safetensors=True,
            output_loading_info=True,
            trust_remote_code=code,
        )
    except UserError:
        raise
    except Exception as error:  # Transformers, safetensors and remote code raise many kinds
        raise UserError(
            f"{source.name} cannot be loaded ({first_line(error)}): is it a causal language model?"
        ) from error
    model, info = loaded
    if info["missing_keys"]:  # Transformers would draw them at random and go on
        first, *others = sorted(info["missing_keys"])
        raise UserError(f"{source.name} lacks '{first}' and {len(others)} other tensors: fetch or copy it again")
    return model, sorted(info["unexpected_keys"])


def _fetched(name: str, *, code: bool) -> Path:
    patterns = [*KEPT, "config.json", INDEX, "*.safetensors", *(["*.py"] if code else [])]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # connections, missing repositories, gated ones
        raise UserError(
            f"'{name}' is no folder here and cannot be fetched from the hub ({first_line(error)}): check the path, the "
            "name and the connection"
        ) from error


def _check_config(source: Source) -> None:
    kind, name = source.config.get("model_type"), source.name
    refuse_foreign(name, source.config)
    if not kind and not source.config.get("auto_map"):
        raise UserError(f"config.json of {name} names no model_type: it is not that of a Transformers model")
    if str(kind).startswith("attnres_"):
        raise UserError(
            f"{name} has depth reads already (residual '{source.config.get('residual')}'): convert the plain one"
        )
    if source.config.get("quantization_config"):
        method = source.config["quantization_config"].get("quant_method", "unknown")
        raise UserError(f"{name} has quantised weights ({method}): save a dequantised copy and convert that")
    if kind not in CONFIG_MAPPING and not source.config.get("auto_map"):
        raise UserError(f"{name} is of type '{kind}', which this version of Transformers does not know: upgrade it")
    if source.remote and not source.trusted:
        code = ", ".join(sorted(map(str, source.remote.values())))
        raise UserError(
            f"{name} brings its own code ({code}), which is not run unasked: read it, then pass trust_remote_code "
            "(--trust-remote-code)"
        )


def weight_files(source: Source) -> list[Path]:
    """Its safetensors, all there. Raises UserError where there are none, or one that the index names is missing."""
    folder, name = source.folder, source.name
    if (folder / INDEX).is_file():
        weights = read_json(folder / INDEX).get("weight_map", {})
        files = [folder / file for file in sorted(set(weights.values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise UserError(
                f"{name} lacks {missing[0]}, {len(missing)} of the {len(files)} files that {INDEX} names: fetch or "
                "copy it again"
            )
        return files
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    pickled = [file.name for pattern in _PICKLED for file in folder.glob(pattern)]
    if pickled:
        raise UserError(
            f"{name} has its weights in {sorted(pickled)[0]}, a pickle, which can run code and is not opened: save it "
            "as safetensors first"
        )
    raise UserError(f"{name} has a config.json and no weights: expected {SINGLE} or {INDEX}")


def check_weights(source: Source, files: list[Path]) -> None:
    """Raises UserError for files that are cut short, and for dtypes that are not `FLOATS`."""
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                kinds = {tensors.get_slice(key).get_dtype(): key for key in tensors.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{file.name} of {source.name} is damaged or cut short ({error}): fetch or copy it again"
            ) from error
        for kind, key in kinds.items():
            # Integers and booleans may be buffers (masks, ids); as weights they are quantised, as the config says.
            if kind.startswith("F") and kind not in FLOATS:
                raise UserError(
                    f"'{key}' of {source.name} has dtype {kind}: expected {', '.join(FLOATS)}; save a "
                    "dequantised copy first"
                )


def _check_tokenizer(source: Source) -> None:
    """A tokenizer whose ids pass the end of the embedding belongs to another model."""
    rows = source.config.get("vocab_size")
    path = source.folder / "tokenizer.json"
    if rows is None or not path.is_file():
        return
    try:
        vocabulary = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises plain Exceptions
        raise UserError(f"tokenizer.json of {source.name} cannot be read ({error}): fetch or copy it again") from error
    largest = max(vocabulary.values(), default=0)
    if largest >= rows:
        raise UserError(
            f"the tokenizer of {source.name} has ids up to {largest} and the embedding {rows} rows: they belong to "
            "different models, or the embedding was not resized"
        )
