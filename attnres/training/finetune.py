"""Choose which parameters of a pretrained model are trained: all, only the residual's, or those and LoRA's.

LoRA (arXiv 2106.09685) adds (alpha / r) B A to each matrix W of the layers, with A (r, in) drawn at random, B (out, r)
zero and W frozen, so that nothing changes before the first step. During training, checkpoints hold the unchanged W, and
A and B separately (adapter.safetensors). The final model has them merged, W + (alpha / r) B A, and is an ordinary
model.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from attnres.errors import UserError, install, require
from attnres.training.config import FinetuneConfig

ADAPTER = "adapter.safetensors"
_WRAPPED = ".base_layer"


def choose_trained(model: Any, config: FinetuneConfig, seed: int) -> None:
    """Freeze parameters and add LoRA's as `config.train_only` says; A is drawn from `seed`.

    Raises:
        UserError: `train_only` residual for a residual without parameters; LoRA without the package peft.
    """
    if config.train_only == "all":
        return
    parameters = list(model.residual.parameters())
    if config.train_only == "residual" and not any(parameter.requires_grad for parameter in parameters):
        raise UserError(
            f"train_only is residual and residual '{model.config.residual}' has no parameters to train: choose another "
            "residual, or train_only all or lora"
        )
    learns = [parameter for parameter in parameters if parameter.requires_grad]  # a frozen recency bias stays frozen
    model.requires_grad_(False)
    if config.train_only == "lora":
        _add_lora(model, config, seed)
    for parameter in learns:
        parameter.requires_grad_(True)


def _add_lora(model: Any, config: FinetuneConfig, seed: int) -> None:
    peft = import_peft()
    from transformers.pytorch_utils import Conv1D

    layers = model.depth_layers
    inside = {id(module) for module in layers.modules() if isinstance(module, nn.Linear | Conv1D)}
    names = [name for name, module in model.named_modules() if id(module) in inside]
    lora = peft.LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=names,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in layers.modules()),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(lora, model)


def import_peft() -> Any:
    """Return the package peft; raises UserError if it is not installed."""
    return require("peft", f"train_only lora needs the package peft: {install('finetune')}, or choose all or residual")


# ------------------------------------------------------------------ base and adapter apart


def base_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters under their names without LoRA, except LoRA's own."""
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            yield name.replace(_WRAPPED, ""), parameter


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return LoRA's parameters by name; none without LoRA."""
    return {name: parameter.detach() for name, parameter in model.named_parameters() if is_adapter(name)}


def is_adapter(name: str) -> bool:
    """Return whether a parameter of that name is one of LoRA's."""
    return ".lora_A." in name or ".lora_B." in name


def save_adapter(model: nn.Module, folder: Path) -> None:
    """Write A and B beside a checkpoint's model; nothing without LoRA."""
    tensors = adapter_tensors(model)
    if tensors:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / ADAPTER)


def load_adapter(model: nn.Module, folder: Path) -> None:
    """Load `save_adapter`'s file into a model with LoRA. Raises LookupError or ValueError if it does not fit."""
    parameters = adapter_tensors(model)
    if not parameters:
        return
    saved = load_file(folder / ADAPTER)
    if parameters.keys() != saved.keys():
        raise LookupError(f"{ADAPTER} has other tensors than the model")
    for name, tensor in parameters.items():
        if tensor.shape != saved[name].shape:
            raise ValueError(f"'{name}' in {ADAPTER} has shape {tuple(saved[name].shape)}, not {tuple(tensor.shape)}")
        tensor.copy_(saved[name])


def base_state(model: nn.Module) -> dict[str, Tensor] | None:
    """Return the state of a model without LoRA's tensors; None for a model without LoRA, whose state dict can be
    used."""
    if not adapter_tensors(model):
        return None
    return {n.replace(_WRAPPED, ""): t for n, t in model.state_dict().items() if not is_adapter(n)}


@torch.no_grad()
def merge_adapter(model: nn.Module) -> None:
    """Add (alpha / r) B A to the weights and restore the modules from before LoRA."""
    if not adapter_tensors(model):
        return
    wrapped = importlib.import_module("peft.tuners.tuners_utils").BaseTunerLayer
    for name, module in list(model.named_modules()):
        if isinstance(module, wrapped):
            module.merge()
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.get_base_layer())
