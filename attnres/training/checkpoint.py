"""Save and load everything that a run needs to continue bit for bit, in one folder that is complete or absent.

    checkpoint/model/                   the model in Hugging Face layout (safetensors), with its tokenizer
    checkpoint/adapter.safetensors      LoRA's tensors, if there are any; the model is then stored without them
    checkpoint/optimizer.safetensors    PARAMETER::ENTRY -> tensor
    checkpoint/state.json               step, configuration, data, random-number states, checksums

For a sharded, pipelined or tensor-parallel model every process writes its shard, which any layout of processes can
read:

    checkpoint/shares/                model.NAME and optimizer.PARAMETER::ENTRY (see attnres.scale.sharded_checkpoint)
    checkpoint/model/                 config and tokenizer, from which the model is built
    checkpoint/state.json             as above, with a checksum of every file

Names are those of the unsharded model. The position in the data needs no state: a batch is a function of (seed, step).
"""

import base64
import random
import shutil
import zlib
from collections.abc import Callable, Container, Iterable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from attnres.errors import UserError
from attnres.files import copy_files, recover_folder, replaced_folder, user_path, write_json, writing
from attnres.folders import refuse_other
from attnres.ops.devices import is_host
from attnres.progress import quiet_transformers
from attnres.reading import read_json
from attnres.residuals import changed_settings
from attnres.training import finetune
from attnres.training.config import same_configuration, same_text
from attnres.training.optim import empty_state, entry_of, load_state_tensors, state_tensors
from attnres.training.records import ADVICE, Checkpointed
from attnres.typed import checked

if TYPE_CHECKING:
    from attnres.training.layout import PlacedModel


T = TypeVar("T")

FORMAT = "attnres-checkpoint-1"


# ------------------------------------------------------------------ writing


def save(
    folder: str | Path,
    model: Any,
    optimizers: list[torch.optim.Optimizer],
    state: dict[str, Any],
    extra_files: Mapping[str, Path],
) -> None:
    """Write a checkpoint that replaces the one in `folder`, which stays until the new one is complete.

    `state` is plain JSON and holds at least `step` and `config`; `extra_files` are written beside the model, under
    their names. Raises UserError if the checkpoint cannot be written.
    """
    tensors = state_tensors(optimizers)
    sums = {"model": checksum(finetune.base_parameters(model)), "optimizer": checksum(tensors.items())}
    if adapter := finetune.adapter_tensors(model):
        sums["adapter"] = checksum(adapter.items())
    with replaced_folder(folder) as temporary:
        save_model(model, temporary / "model")
        copy_files(extra_files, temporary / "model")
        finetune.save_adapter(model, temporary)
        save_file(tensors, temporary / "optimizer.safetensors")
        write_json(temporary / "state.json", {"format": FORMAT, **state, "checksums": sums})


def save_model(model: Any, folder: Path) -> None:
    """Write the model in Hugging Face layout, without LoRA's tensors."""
    with quiet_transformers():
        model.save_pretrained(folder, state_dict=finetune.base_state(model))


def keep(run: Path, step: int) -> None:
    """Copy a run's checkpoint to the path of `kept`, whole or not at all. Raises UserError."""
    with replaced_folder(kept(run, step)) as temporary:
        shutil.copytree(run / "checkpoint", temporary, dirs_exist_ok=True)


def kept(run: Path, step: int) -> Path:
    """Return RUN/kept/STEP, the step in six digits or more."""
    return run / "kept" / f"{step:06d}"


def reconfigure(run: Path, config: dict[str, Any]) -> None:
    """Give a run's folder, and its checkpoint if there is one, another configuration."""
    write_json(run / "config.json", config)
    if (state := run / "checkpoint" / "state.json").is_file():
        write_json(state, {**read_json(state), "config": config})


# ------------------------------------------------------------------ reading


def restore(
    folder: str | Path, state: dict[str, Any], placed: "PlacedModel", optimizers: list[torch.optim.Optimizer]
) -> None:
    """Load the optimizers, and for a sharded checkpoint the model too, whatever layout wrote it.

    Raises:
        UserError: the checkpoint is damaged or does not fit.
    """
    if state["format"] == IN_SHARES:
        fill(Path(folder), placed, optimizers)
    else:
        load_optimizers(folder, state, optimizers, {name for name, _ in placed.named_parameters()})


def read_state(folder: str | Path, config: dict[str, Any], data: dict[str, Any]) -> dict[str, Any] | None:
    """Return the `state` of the checkpoint in `folder`, or None if there is none.

    Raises UserError if it is damaged, no checkpoint of this package, or belongs to another configuration or other data.
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
    """Read a checkpoint's state.json. Raises UserError if it is damaged or of another program."""
    values = read_json(folder / "state.json")
    if not isinstance(values, dict) or values.get("format") not in (FORMAT, IN_SHARES):
        raise UserError(
            f"{folder} is not a checkpoint of attnres (expected format {FORMAT} or {IN_SHARES} in state.json)"
        )
    return dict(checked(values, Checkpointed, folder / "state.json", ADVICE))


def as_saved(folder: str | Path, restore: Callable[[], T]) -> T:
    """Call `restore` on the state in `folder`; raise UserError if the state does not have the expected form."""
    try:
        return restore()
    except (LookupError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise UserError(f"cannot go on from {folder}/state.json ({error}): {DAMAGED}") from error


def load_model(folder: str | Path, state: dict[str, Any]) -> Any:
    """Load the model of the checkpoint in `folder`, after checking its residual and settings (which the shapes of
    tensors do not show) and the tensors against `state`. Raises UserError if damaged."""
    from attnres.models import load

    if state["format"] == IN_SHARES:
        return unfilled(Path(folder), state)
    path = Path(folder) / "model"
    try:
        model: Any = load(path)
    except (OSError, SafetensorError, RuntimeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"cannot load the model in {path} ({error}): {DAMAGED}") from error
    check_residual(model.config, state, path)
    for parameter in model.parameters():  # copied out of the memory-mapped file, aligned as a new tensor is
        parameter.data = parameter.data.clone()
    if checksum(finetune.base_parameters(model)) != state["checksums"].get("model"):
        raise UserError(f"the tensors in {path} are not those that were saved: {DAMAGED}")
    return model


def load_adapter(folder: str | Path, state: dict[str, Any], model: nn.Module) -> None:
    """Load LoRA's tensors, if the model has any, from the checkpoint in `folder`. Raises UserError if it is damaged."""
    try:
        finetune.load_adapter(model, Path(folder))
        if (adapter := finetune.adapter_tensors(model)) and checksum(adapter.items()) != state["checksums"]["adapter"]:
            raise ValueError("its tensors are not those that were saved")
    except (OSError, SafetensorError, LookupError, ValueError) as error:
        raise UserError(f"cannot load {Path(folder) / finetune.ADAPTER} ({error}): {DAMAGED}") from error


def load_optimizers(
    folder: str | Path, state: dict[str, Any], optimizers: list[torch.optim.Optimizer], parameters: Container[str]
) -> None:
    """Load the optimizers' entries for `parameters` from the checkpoint in `folder`. Raises UserError if they do not
    fit."""
    path = Path(folder) / "optimizer.safetensors"
    try:
        tensors = load_file(path)
        if checksum(tensors.items()) != state["checksums"].get("optimizer"):
            raise UserError("its tensors are not those that were saved")
        trained_states = {key: tensor.clone() for key, tensor in tensors.items() if entry_of(key)[0] in parameters}
        load_state_tensors(optimizers, trained_states)
    except (OSError, SafetensorError, LookupError, ValueError) as error:
        raise UserError(f"cannot load the optimizer state {path} ({error}): {DAMAGED}") from error


def checksum(tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Return the CRC-32 of the names and bytes of tensors, sorted by name."""
    value = 0
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        value = zlib.crc32(name.encode(), value)
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        value = zlib.crc32(memoryview(data.numpy()), value)
    return value


# ------------------------------------------------------------------ sharded checkpoints


IN_SHARES = "attnres-checkpoint-shares-1"
SHARES = "shares"
DAMAGED = "it is damaged or not of this run; remove the folder to start again, or use another --out"
"""Message for a checkpoint, sharded or not, that lacks expected content."""


class ShardedSave:
    """A sharded checkpoint that is being written: every process writes its shard.

    The folder exists once the first process has finished its part; `wait` returns on every process when that is so.
    """

    def __init__(
        self,
        folder: str | Path,
        placed: "PlacedModel",
        optimizers: list[torch.optim.Optimizer],
        state: dict[str, Any],
        extra_files: Mapping[str, Path],
    ) -> None:
        """Start writing from copies of the tensors if `placed.saving` is a process group for it; otherwise write
        everything now.

        `state` and `extra_files` are as in `checkpoint.save`.

        Raises:
            UserError: a process could not write its part.
        """
        from attnres.scale.sharded_checkpoint import begin_shards, file_sums, save_shards

        self.who, self.stack = placed.who, ExitStack()
        optimizer = {f"optimizer.{key}": value for key, value in state_tensors(optimizers).items()}
        tensors = _model_tensors(placed) | optimizer
        place = Path(self.who.of_first(lambda: str(self.stack.enter_context(replaced_folder(folder)))))
        config = placed.model.config

        def complete() -> None:
            with writing(folder):
                config.save_pretrained(place / "model")
                copy_files(extra_files, place / "model")
                sums = file_sums(place / SHARES)
                write_json(place / "state.json", {"format": IN_SHARES, **state, "checksums": sums})
                self.stack.close()

        self.written: Future[None] | None = None
        try:
            if placed.saving is None:
                save_shards(place / SHARES, tensors)
                self.who.of_first(complete)
                return
            self.written = begin_shards(place / SHARES, tensors, placed.saving)
        except BaseException as error:
            self.stack.__exit__(type(error), error, error.__traceback__)
            raise
        self.completed = Future[None]()
        if self.who.first:
            Thread(target=self._complete, args=(complete,), name="complete checkpoint").start()

    def _complete(self, complete: Callable[[], None]) -> None:
        assert self.written is not None
        try:
            self.written.result()
            complete()
        except Exception as error:  # whatever the error, all processes are told
            with suppress(Exception):  # this leaves the previous checkpoint in place
                self.stack.__exit__(type(error), error, error.__traceback__)
            refusal = error if isinstance(error, UserError) else UserError(f"cannot write the checkpoint: {error}")
            self.completed.set_exception(refusal)
        else:
            self.completed.set_result(None)

    def wait(self) -> None:
        """Wait until the checkpoint is complete. Raises UserError on every process if it could not be written."""
        with self.who.alike():
            self.end()

    def end(self) -> None:
        """Wait until this process's part is written. Raises UserError if it could not be written."""
        if self.written is not None:
            (self.completed if self.who.first else self.written).result()


def fill(folder: Path, placed: "PlacedModel", optimizers: list[torch.optim.Optimizer]) -> None:
    """Load the model and the optimizers from the checkpoint in `folder`, whatever layout wrote it.

    Raises:
        UserError: the checkpoint is damaged or does not fit.
    """
    from attnres.scale.sharded_checkpoint import load_shards, shapes_in

    place = folder / SHARES
    shapes = {
        key.removeprefix("optimizer."): size for key, size in shapes_in(place).items() if key[:10] == "optimizer."
    }
    entries = empty_state(optimizers, shapes)
    load_shards(place, _model_tensors(placed) | {f"optimizer.{key}": value for key, value in entries.items()})
    load_state_tensors(optimizers, entries)


def _model_tensors(placed: "PlacedModel") -> dict[str, Tensor]:
    tensors = {**dict(placed.named_parameters()), **placed.named_buffers()}
    return {f"model.{name}": tensor.detach() for name, tensor in tensors.items()}


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the persistent buffers of a model, which its state_dict has, by name."""
    names = {name for name, _ in model.named_buffers()}
    return {name: tensor for name, tensor in model.state_dict().items() if name in names}


def unfilled(folder: Path, state: dict[str, Any]) -> Any:
    """Return the model of a sharded checkpoint, uninitialised until `fill`; the files are checked. Raises UserError."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from attnres.models.classes import register_stored
    from attnres.scale.sharded_checkpoint import check_files

    check_files(folder / SHARES, state["checksums"])
    path = folder / "model"
    register_stored(read_json(path / "config.json"), path)
    try:
        config = AutoConfig.from_pretrained(path)
        with torch.random.fork_rng(devices=[]):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"cannot build the model of {folder} ({error}): {DAMAGED}") from error
    check_residual(config, state, path)
    return model


def check_residual(config: Any, state: dict[str, Any], path: Path) -> None:
    """Raise UserError if the model config in `path` has another residual than the run of `state`."""
    run_model = state["config"]["model"]
    residual, settings = (getattr(config, name, None) for name in ("residual", "residual_settings"))
    run_settings = changed_settings(run_model["residual"], run_model["settings"])
    if residual != run_model["residual"] or changed_settings(run_model["residual"], settings) != run_settings:
        raise UserError(
            f"the model in {path} has the residual {residual} {settings}, expected {run_model['residual']} "
            f"{run_settings}: {DAMAGED}"
        )


# ------------------------------------------------------------------ random-number states


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of Python's, NumPy's, PyTorch's and an accelerator's generators, as plain JSON."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 (other code draws there)
    state = {
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": _encode(torch.get_rng_state()),
    }
    if not is_host(device):
        state[device.type] = _encode(torch.get_device_module(device).get_rng_state(device))
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore the states of `random_state`."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(_decode(state["torch"]))
    if not is_host(device) and device.type in state:
        torch.get_device_module(device).set_rng_state(_decode(state[device.type]), device)


def _encode(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


# ------------------------------------------------------------------ export


def export_weights(name: str, out: str, *, trust_remote_code: bool = False) -> str:
    """Write the model of a run, a checkpoint or any model with depth reads in Hugging Face layout, with its tokenizer.

    Returns:
        A description of what was written, in a few lines.

    Raises:
        UserError: no model or a damaged one, or a folder that is not empty.
    """
    from attnres.models import export_model
    from attnres.models.export import write_model
    from attnres.models.open import open_config

    path = user_path(name)
    finished = (path / "model" / "config.json").is_file() and not (path / SHARES).is_dir()
    folder = path if (path / SHARES).is_dir() or finished else path / "checkpoint"
    if not (folder / SHARES).is_dir():
        return export_model(name, out, trust_remote_code=trust_remote_code)
    from attnres.scale.sharded_checkpoint import load_shards

    target = refuse_other(out)
    state = stored_state(folder)
    model = unfilled(folder, state)
    tensors = {**dict(model.named_parameters()), **saved_buffers(model)}
    load_shards(folder / SHARES, {f"model.{key}": tensor.detach() for key, tensor in tensors.items()})
    write_model(model.eval(), target, open_config(folder / "model").files_beside(), source=name)
    return f"{name} at step {state['step']} -> {out}"
