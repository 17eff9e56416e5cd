"""A checkpoint of a model in shares, stages or slices: files of every process, which any layout of processes reads.

    checkpoint/shares/                model.NAME and optimizer.PARAMETER::ENTRY (see attnres.scale.sharded_checkpoint)
    checkpoint/model/                 what to build the model from, and its tokenizer
    checkpoint/state.json             as of a whole one (attnres.training.checkpoint), with a checksum of every file

Names are those of the whole model.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attnres.errors import UserError
from attnres.files import copy_files, replaced_folder, write_json, writing
from attnres.reading import read_json
from attnres.training.optim import empty_state, load_state_tensors, state_tensors

if TYPE_CHECKING:
    from attnres.training.layout import Whole as Layout

IN_SHARES = "attnres-checkpoint-shares-1"
SHARES = "shares"
DAMAGED = "it is damaged or not of this run; remove the folder to start again, or use another --out"
"""What is said of a checkpoint, whole or in shares, that does not hold what it should."""


class Saving:
    """A checkpoint in shares that is being written: every process writes what it has.

    The folder is there once the first process's part is done; `wait` says on every process whether it is.
    """

    def __init__(
        self,
        folder: str | Path,
        layout: "Layout",
        optimizers: list[torch.optim.Optimizer],
        state: dict[str, Any],
        extra_files: Mapping[str, Path],
    ) -> None:
        """Begin, with copies of the tensors where `layout.saving` is a group for it; else write all of it here.

        `state` and `extra_files` are as in `checkpoint.save`.

        Raises:
            UserError: one of the processes could not write.
        """
        from attnres.scale.sharded_checkpoint import begin_shards, file_sums, save_shards

        self.who, self.stack = layout.who, ExitStack()
        optimizer = {f"optimizer.{key}": value for key, value in state_tensors(optimizers).items()}
        tensors = _model_tensors(layout) | optimizer
        place = Path(self.who.of_first(lambda: str(self.stack.enter_context(replaced_folder(folder)))))
        config = layout.model.config

        def complete() -> None:
            with writing(folder):
                config.save_pretrained(place / "model")
                copy_files(extra_files, place / "model")
                sums = file_sums(place / SHARES)
                write_json(place / "state.json", {"format": IN_SHARES, **state, "checksums": sums})
                self.stack.close()

        self.written: Future[None] | None = None
        try:
            if layout.saving is None:
                save_shards(place / SHARES, tensors)
                self.who.of_first(complete)
                return
            self.written = begin_shards(place / SHARES, tensors, layout.saving)
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
        except Exception as error:  # whatever it is, all processes are told
            with suppress(Exception):  # which leaves the checkpoint before in its place
                self.stack.__exit__(type(error), error, error.__traceback__)
            refusal = error if isinstance(error, UserError) else UserError(f"cannot write the checkpoint: {error}")
            self.completed.set_exception(refusal)
        else:
            self.completed.set_result(None)

    def wait(self) -> None:
        """Return when the checkpoint is complete. Raises UserError, on every process, where it could not be written."""
        with self.who.alike():
            self.end()

    def end(self) -> None:
        """Return when this process's part is done. Raises UserError where it could not be written."""
        if self.written is not None:
            (self.completed if self.who.first else self.written).result()


def fill(folder: Path, layout: "Layout", optimizers: list[torch.optim.Optimizer]) -> None:
    """Fill the model and the optimizers from the checkpoint in `folder`, whatever layout wrote it.

    Raises:
        UserError: it is damaged or does not fit.
    """
    from attnres.scale.sharded_checkpoint import load_shards, shapes_in

    here = folder / SHARES
    shapes = {key.removeprefix("optimizer."): size for key, size in shapes_in(here).items() if key[:10] == "optimizer."}
    entries = empty_state(optimizers, shapes)
    load_shards(here, _model_tensors(layout) | {f"optimizer.{key}": value for key, value in entries.items()})
    load_state_tensors(optimizers, entries)


def _model_tensors(layout: "Layout") -> dict[str, Tensor]:
    tensors = {**dict(layout.named_parameters()), **layout.named_buffers()}
    return {f"model.{name}": tensor.detach() for name, tensor in tensors.items()}


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a model that its state_dict has, by name."""
    names = {name for name, _ in model.named_buffers()}
    return {name: tensor for name, tensor in model.state_dict().items() if name in names}


def unfilled(folder: Path, state: dict[str, Any]) -> Any:
    """The model of a checkpoint in shares, whose numbers `fill` reads; its files are checked. Raises UserError."""
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
    """Refuse the config of a model in `path` that has another residual than the run of `state`: UserError."""
    ours = state["config"]["model"]
    residual, settings = (getattr(config, name, None) for name in ("residual", "residual_settings"))
    if (residual, settings or {}) != (ours["residual"], ours["settings"]):
        raise UserError(
            f"the model in {path} has the residual {residual} {settings}, expected {ours['residual']} "
            f"{ours['settings']}: {DAMAGED}"
        )
