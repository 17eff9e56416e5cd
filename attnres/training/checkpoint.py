"""Everything a run needs to continue bit for bit, in one folder that is whole or not there.

    checkpoint/model/                 the model in Hugging Face layout (safetensors), with its tokenizer
    checkpoint/adapter.safetensors    LoRA's tensors, where there are any; the model is then as it was without them
    checkpoint/optimizer.safetensors  PARAMETER::ENTRY -> tensor
    checkpoint/state.json             step, configuration, data, random-number states, checksums

Of a model in shares or stages the first three are others: attnres.training.shares.

The position in the data needs no state: a batch is a pure function of (seed, step).
"""

import shutil
import zlib
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from attnres.errors import UserError
from attnres.files import copy_files, recover_folder, replaced_folder, write_json
from attnres.progress import quiet_transformers
from attnres.reading import read_json
from attnres.training import regimes
from attnres.training.optim import entry_of, load_state_tensors, state_tensors
from attnres.training.records import ADVICE, Checkpointed
from attnres.training.sameness import same_configuration, same_text
from attnres.training.shares import DAMAGED, IN_SHARES, check_residual, fill, unfilled
from attnres.typed import checked

if TYPE_CHECKING:
    from attnres.training.layout import Whole as Layout

T = TypeVar("T")

FORMAT = "attnres-checkpoint-1"


def save(
    folder: str | Path,
    model: Any,
    optimizers: list[torch.optim.Optimizer],
    state: dict[str, Any],
    extra_files: Mapping[str, Path],
) -> None:
    """Write a checkpoint in place of the one in `folder`, which stays until the new one is complete.

    `state` is plain JSON and holds at least `step` and `config`; `extra_files` go with the model, under their
    names. Raises UserError when it cannot be written.
    """
    tensors = state_tensors(optimizers)
    sums = {"model": checksum(regimes.base_parameters(model)), "optimizer": checksum(tensors.items())}
    if adapter := regimes.adapter_tensors(model):
        sums["adapter"] = checksum(adapter.items())
    with replaced_folder(folder) as temporary:
        save_model(model, temporary / "model")
        copy_files(extra_files, temporary / "model")
        regimes.save_adapter(model, temporary)
        save_file(tensors, temporary / "optimizer.safetensors")
        write_json(temporary / "state.json", {"format": FORMAT, **state, "checksums": sums})


def keep(run: Path, step: int) -> None:
    """Copy the checkpoint of a run's folder to where `kept` says, whole or not at all. Raises UserError."""
    with replaced_folder(kept(run, step)) as temporary:
        shutil.copytree(run / "checkpoint", temporary, dirs_exist_ok=True)


def kept(run: Path, step: int) -> Path:
    """RUN/kept/STEP, the step in six digits or more."""
    return run / "kept" / f"{step:06d}"


def reconfigure(run: Path, config: dict[str, Any]) -> None:
    """Make the run in a folder, and its checkpoint if there is one, a run of this configuration."""
    write_json(run / "config.json", config)
    if (state := run / "checkpoint" / "state.json").is_file():
        write_json(state, {**read_json(state), "config": config})


def save_model(model: Any, folder: Path) -> None:
    """Write the model in Hugging Face layout; LoRA's tensors are no part of it."""
    with quiet_transformers():
        model.save_pretrained(folder, state_dict=regimes.base_state(model))


def restore(
    folder: str | Path, state: dict[str, Any], layout: "Layout", optimizers: list[torch.optim.Optimizer]
) -> None:
    """Fill the optimizers, and of a checkpoint in shares the model too, whatever layout wrote it.

    Raises:
        UserError: the checkpoint is damaged or does not fit.
    """
    if state["format"] == IN_SHARES:
        fill(Path(folder), layout, optimizers)
    else:
        load_optimizers(folder, state, optimizers, {name for name, _ in layout.named_parameters()})


def read_state(folder: str | Path, config: dict[str, Any], data: dict[str, Any]) -> dict[str, Any] | None:
    """The `state` of the checkpoint in `folder`, or None if there is none.

    Raises UserError if it is damaged, is not one of ours, or belongs to another configuration or other data.
    """
    folder = Path(folder)
    recover_folder(folder)
    if not folder.exists():
        return None
    state = stored_state(folder)
    same_configuration(config, state["config"], f"the checkpoint {folder}")
    same_text(data, state["data"], f"the checkpoint {folder}")
    return state


def stored_state(folder: Path) -> dict[str, Any]:
    """What state.json of a checkpoint holds. Raises UserError if it is damaged or not one of ours."""
    values = read_json(folder / "state.json")
    if not isinstance(values, dict) or values.get("format") not in (FORMAT, IN_SHARES):
        raise UserError(
            f"{folder} is not a checkpoint of attnres (expected format {FORMAT} or {IN_SHARES} in state.json)"
        )
    return dict(checked(values, Checkpointed, folder / "state.json", ADVICE))


def as_saved(folder: str | Path, restore: Callable[[], T]) -> T:
    """What `restore` makes of the state in `folder`; raises UserError where the state does not have its form."""
    try:
        return restore()
    except (LookupError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise UserError(f"cannot go on from {folder}/state.json ({error}): {DAMAGED}") from error


def load_model(folder: str | Path, state: dict[str, Any]) -> Any:
    """The model of the checkpoint in `folder`, checked against `state`: its residual and settings (which the shapes
    of the tensors do not tell) and the tensors. Raises UserError if damaged.
    """
    from attnres.models import load

    if state["format"] == IN_SHARES:
        return unfilled(Path(folder), state)
    path = Path(folder) / "model"
    try:
        model: Any = load(path)
    except (OSError, SafetensorError, RuntimeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"cannot load the model in {path} ({error}): {DAMAGED}") from error
    check_residual(model.config, state, path)
    for parameter in model.parameters():  # out of the memory-mapped file, aligned as a freshly made tensor is
        parameter.data = parameter.data.clone()
    if checksum(regimes.base_parameters(model)) != state["checksums"].get("model"):
        raise UserError(f"the tensors in {path} are not those that were saved: {DAMAGED}")
    return model


def load_adapter(folder: str | Path, state: dict[str, Any], model: nn.Module) -> None:
    """Fill LoRA's tensors, if the model has any, from the checkpoint in `folder`. Raises UserError if it is damaged."""
    try:
        regimes.load_adapter(model, Path(folder))
        if (adapter := regimes.adapter_tensors(model)) and checksum(adapter.items()) != state["checksums"]["adapter"]:
            raise ValueError("its tensors are not those that were saved")
    except (OSError, SafetensorError, LookupError, ValueError) as error:
        raise UserError(f"cannot load {Path(folder) / regimes.ADAPTER} ({error}): {DAMAGED}") from error


def load_optimizers(
    folder: str | Path, state: dict[str, Any], optimizers: list[torch.optim.Optimizer], parameters: Container[str]
) -> None:
    """Fill the optimizers from the checkpoint in `folder`, those entries that are of `parameters`. Raises UserError if
    it does not fit."""
    path = Path(folder) / "optimizer.safetensors"
    try:
        tensors = load_file(path)
        if checksum(tensors.items()) != state["checksums"].get("optimizer"):
            raise UserError("its tensors are not those that were saved")
        ours = {key: tensor.clone() for key, tensor in tensors.items() if entry_of(key)[0] in parameters}
        load_state_tensors(optimizers, ours)
    except (OSError, SafetensorError, LookupError, ValueError) as error:
        raise UserError(f"cannot load the optimizer state {path} ({error}): {DAMAGED}") from error


# ------------------------------------------------------------------ checks


def checksum(tensors: Iterable[tuple[str, Tensor]]) -> int:
    """CRC-32 of the names and bytes of tensors, in order of name."""
    value = 0
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        value = zlib.crc32(name.encode(), value)
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        value = zlib.crc32(memoryview(data.numpy()), value)
    return value
