"""Where a model lies: its folder, the run that it is of, and its config.json; no weight is read and no code is run."""

import functools
from pathlib import Path
from typing import Any, TypedDict

from attnres.data.tokenizer import TOKENIZER_FILES
from attnres.errors import UserError
from attnres.folders import kind_of
from attnres.hub import fetch, is_hub_name
from attnres.models.foreign import formats_of
from attnres.models.weight_files import AGAIN, INDEX, SINGLE, other_weights, weight_names
from attnres.paths import user_path
from attnres.reading import read_json
from attnres.typed import checked

BESIDE = (*TOKENIZER_FILES, "chat_template*", "generation_config.json", "LICENSE*")
"""Files that go along with a model."""
ADAPTER = "adapter_config.json"
"""By which PEFT, and Transformers where it loads a model, know the folder of an adapter."""


class Fields(TypedDict, total=False):
    """What is looked at in a config.json before Transformers makes a config of it."""

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
    """Folder of the model, and of the run that it is of.

    Args:
        code: Python files are fetched too, of a model on the hub.

    Raises:
        UserError: nothing there, an unfinished run, or no config.json of a model.
    """
    path = user_path(name)
    if _is_remote(name, path):
        return _fetched(name, code=code), None
    folder, run = _on_disk(name, path)
    _refuse_adapter(name, folder)
    return folder, run


def config_place(name: str) -> Path:
    """Folder of a model of which no more than config.json need be there or is fetched. Raises UserError."""
    path = user_path(name)
    if _is_remote(name, path):
        return _described(name, ["config.json"])
    inner = path / "model"
    return inner if (inner / "config.json").is_file() else _on_disk(name, path)[0]


def _is_remote(name: str, path: Path) -> bool:
    return not path.exists() and is_hub_name(name)


def _on_disk(name: str, path: Path) -> tuple[Path, Path | None]:
    if not path.exists():
        raise UserError(f"model '{name}' does not exist: expected a run folder, a model folder or a name on the hub")
    inner = path / "model"
    if (path / "shares").is_dir() and (path / "state.json").is_file():
        raise UserError(
            f"{name} is in the shares of several processes, which attnres train --resume reads: let the run finish, or "
            f"write its model as it is with attnres export {name} OUT --weights"
        )
    if (inner / "config.json").is_file() and (path / "state.json").is_file():
        if (path / "adapter.safetensors").is_file():
            raise UserError(f"{name} has LoRA's tensors beside its model, which become one when the run is finished")
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
    """Refuse with a UserError a folder of an adapter: beside a model Transformers would add it, from a pickle too."""
    if (folder / ADAPTER).is_file():
        raise UserError(
            f"{name} holds {ADAPTER}, a PEFT adapter (LoRA, say), which changes another model: give that model, or "
            "merge the adapter into it first (PEFT's merge_and_unload, then save_pretrained into a folder of its own)"
        )


def _what_else(path: Path) -> str:
    """Say what lies where no config.json is, and what to give instead, as the end of a sentence."""
    expected = "expected a run folder, or a folder with config.json and safetensors"
    # A cache of the hub (models--OWNER--NAME), what Transformers' Trainer wrote (checkpoint-500), a folder of runs.
    inner = [file.parent for pattern in ("snapshots/*", "*") for file in path.glob(f"{pattern}/config.json")]
    if inner:
        return f"{expected}, such as {max(inner, key=lambda folder: folder.stat().st_mtime)} in it"
    other = other_weights(path)
    return expected if other is None else f"it {'is' if path.is_file() else 'has'} {other}"


def fields_of(name: str, folder: Path) -> dict[str, Any]:
    """Return config.json of a model. Raises UserError."""
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
    """The folder of a model of the hub, which is asked once: first for what says which files are the weights."""
    folder = _described(name, [*BESIDE, "config.json", INDEX, *(["*.py"] if code else [])])
    return fetch(name, weight_names(folder))


def _described(name: str, patterns: list[str]) -> Path:
    """Fetch files of a model of the hub, config.json among them. Raises UserError where it has none, or an adapter."""
    folder = fetch(name, [*patterns, ADAPTER])
    _refuse_adapter(name, folder)
    if not (folder / "config.json").is_file():
        raise UserError(f"{name} on the hub holds no model: it has no config.json")
    return folder
