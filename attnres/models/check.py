"""Check a mechanism: the checks of `attnres.residuals.check`, and those that need a Transformers model around it."""

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import logging

from attnres.errors import UserError, foreign
from attnres.head import evaluating, next_token_losses
from attnres.models.bases import DepthMixin, checkpoint_activations
from attnres.models.build import build
from attnres.models.model_files import SINGLE
from attnres.models.open import load
from attnres.progress import quiet_transformers
from attnres.residuals import Residual, make_residual, source_file
from attnres.residuals.check import CHECKS, Outcome, outcomes
from attnres.residuals.check.subject import Subject, close, expect, stir

_WIDTH, _VOCABULARY, _LENGTH = 32, 50, 16
_SIZE = {
    "family": "qwen3",
    "hidden_size": _WIDTH,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
}
_LAYERS = (3, 2, 4, 1, 5, 6, 8, 12, 16)
"""Numbers of layers of the models, in order of preference; the first that the settings allow is used."""
_FP32 = 1e-4
"""Largest accepted difference in fp32 between two ways to one result, relative to its scale."""


def check(name: str, **settings: Any) -> list[Outcome]:
    """Check a mechanism with these settings: in networks of plain torch, and in a small model.

    >>> failures = [outcome for outcome in check("rescaled") if not outcome.passed]     # doctest: +SKIP

    Args:
        name: of a mechanism, or FILE.py:CLASS.

    Raises:
        UserError: an unknown name or setting, or settings that fit no depth.
    """
    return list(checks(name, settings))


def checks(name: str, settings: dict[str, Any]) -> Iterator[Outcome]:
    """Run the checks of `check` one by one."""
    subject = Subject.of(name, settings)
    yield from outcomes(CHECKS, subject)
    with quiet_transformers():
        yield from outcomes(MODEL_CHECKS, subject)


def _model(subject: Subject, *, stirred: bool = True) -> DepthMixin:
    """Return a small fp32 model in evaluation mode, its residual's parameters away from their start values."""
    name, settings, refusal = subject.mechanism.name, subject.settings, ""
    for layers in _LAYERS:
        try:
            make_residual(name, 2 * layers, _WIDTH, **settings)
        except UserError as error:
            refusal = str(error)
            continue
        size = {**_SIZE, "num_hidden_layers": layers}
        model = build(size, name, vocab_size=_VOCABULARY, max_positions=_LENGTH, settings=settings).eval()
        if stirred:
            stir(model.residual)
        return model
    raise UserError(f"it fits no model of {min(_LAYERS)} to {max(_LAYERS)} layers: {refusal}")


def refuse_failing(name: str, layers: int, settings: dict[str, Any]) -> None:
    """Refuse with a UserError a mechanism from a user's file whose forward or backward fails in a narrow model of
    `layers` layers. Settings that do not fit so narrow a model pass; the model itself will raise."""
    size = {**_SIZE, "num_hidden_layers": layers}
    try:
        model = build(size, name, vocab_size=_VOCABULARY, max_positions=_LENGTH, settings=settings)
    except UserError:
        return
    file = source_file(name)
    with foreign(f"a model with '{name}' of {file} cannot be trained", f"attnres check {file} shows where"):
        next_token_losses(model, _tokens()).mean().backward()


def _tokens() -> Tensor:
    return torch.randint(_VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def _logits(model: Any) -> Tensor:
    return model(input_ids=_tokens(), use_cache=False).logits


def built(subject: Subject) -> str:
    """Check that the model's weights equal those with the standard residual, and that the mechanism's parameters have
    their start values in fp32."""
    model = _model(subject, stirred=False)
    size = {**_SIZE, "num_hidden_layers": model.config.num_hidden_layers}
    plain = build(size, "standard", vocab_size=_VOCABULARY, max_positions=_LENGTH)
    scaled = model.residual.branch_scale() != 1.0
    for name, weight in plain.state_dict().items():
        expect(scaled or torch.equal(model.state_dict()[name], weight), f"{name} is drawn differently")
    starts = _start_values(subject, model)
    for name, inside in model.residual.named_parameters():
        expect(inside.dtype is torch.float32, f"{name} is {inside.dtype} in a model, not fp32")
        expect(starts(name, inside), f"{name} does not have its start values in a model")
    expect(bool(_logits(model).isfinite().all()), "the logits are not finite")
    return f"{model.config.num_hidden_layers} layers of {_SIZE['family']}"


def _start_values(subject: Subject, model: DepthMixin) -> Callable[[str, Tensor], bool]:
    """Return a function (name, value) -> whether a parameter of the residual has its start value. A parameter that two
    new models draw differently passes if its size fits the draw: within a factor of 2, or more for few elements, whose
    size varies from draw to draw."""
    fresh: list[Residual] = []
    for seed in (1, 2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            fresh.append(model.config.make_residual())

    def starts(name: str, value: Tensor) -> bool:
        first_draw, second_draw = (residual.get_parameter(name) for residual in fresh)
        if torch.equal(first_draw, second_draw):
            return torch.equal(value, first_draw)
        ratio = (value.square().mean() / torch.stack([first_draw, second_draw]).square().mean()).sqrt()
        return ratio.log().abs().item() < max(math.log(2), 4 * value.numel() ** -0.5)

    return starts


def training(subject: Subject) -> str:
    """Check that a training step in bf16 autocast has finite gradients, and the same ones with activation
    checkpointing."""
    model = _model(subject).train()

    def gradients() -> tuple[float, list[Tensor]]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = next_token_losses(model, _tokens()).mean()
        loss.backward()
        return loss.item(), [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]

    loss, grads = gradients()
    for (name, _), grad in zip(model.named_parameters(), grads, strict=True):
        expect(bool(grad.isfinite().all()), f"the gradient of {name} is not finite")
    checkpoint_activations(model, "layer")
    largest = max(
        close(remade, grad, f"activation checkpointing changes the gradient of {name}", _FP32)
        for (name, _), grad, remade in zip(model.named_parameters(), grads, gradients()[1], strict=True)
    )
    with torch.no_grad():
        exact = next_token_losses(model.double(), _tokens()).mean().item()
    expect(abs(loss - exact) < 0.1 * exact, f"the loss is {loss:.3f} in bf16 autocast and {exact:.3f} in fp64")
    return f"checkpointing {largest:.1e}, loss {loss:.3f} in bf16 autocast, {exact:.3f} in fp64"


@torch.no_grad()
def decoding(subject: Subject) -> str:
    """Check that decoding token by token with a cache gives the logits of a whole pass, also with padding on the
    left."""
    model, ids = _model(subject), _tokens()
    expected = _logits(model)
    output = model(input_ids=ids[:, :4], use_cache=True)
    parts = [output.logits]
    for position in range(4, ids.shape[1]):
        output = model(
            input_ids=ids[:, position : position + 1], past_key_values=output.past_key_values, use_cache=True
        )
        parts.append(output.logits)
    far = close(torch.cat(parts, 1), expected, "cached decoding changes the logits", _FP32)
    padding = 3
    mask = torch.ones(len(ids), padding + ids.shape[1], dtype=torch.long)
    mask[:, :padding] = 0
    padded = model(
        input_ids=torch.nn.functional.pad(ids, (padding, 0)),
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp_min(0),
        use_cache=False,
    ).logits[:, padding:]
    return f"{max(far, close(padded, expected, 'padding on the left changes the logits', _FP32)):.1e}"


def saving(subject: Subject) -> str:
    """Check that a saved and reloaded model computes the same, and that parameters missing from a file get their start
    values."""
    model = _model(subject)
    model.residual("set_progress", 1.0)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model.save_pretrained(folder)
        loaded: Any = load(folder)
        for name, tensor in model.residual.state_dict().items():
            expect(
                torch.equal(loaded.residual.state_dict()[name], tensor), f"{name} changes when it is saved and loaded"
            )
        expect(torch.equal(_logits(loaded), _logits(model)), "a saved model computes other logits when it is loaded")
        half: Any = load(folder, dtype=torch.bfloat16)
        for name, parameter in half.residual.named_parameters():
            expect(parameter.dtype is torch.float32, f"{name} is {parameter.dtype} in a model loaded in bf16, not fp32")
        names = [name for name, _ in model.residual.named_parameters()]
        weights = load_file(folder / SINGLE)
        for lacking in (names, names[-1:]):
            _check_lacking(model, folder, weights, lacking, subject)
    return f"{len(names)} tensors of the residual in the file"


def _check_lacking(
    model: DepthMixin, folder: Path, weights: dict[str, Tensor], lacking: list[str], subject: Subject
) -> None:
    """Load from a file without some of the residual's parameters: those get start values, the others the file's."""
    left_out = {f"{model.base_model_prefix}.residual.{name}" for name in lacking}
    kept = {key: tensor for key, tensor in weights.items() if key not in left_out}
    save_file(kept, folder / SINGLE, metadata={"format": "pt"})
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # Transformers would log which weights are new
    try:
        residual = type(model).from_pretrained(folder).residual
    finally:
        logging.set_verbosity(level)
    starts = _start_values(subject, model)
    for name, parameter in residual.named_parameters():
        if name in lacking:
            expect(starts(name, parameter), f"{name} does not start where it should in a model whose file lacks it")
        else:
            saved = torch.equal(parameter, model.residual.get_parameter(name))
            expect(saved, f"{name} changes if a file lacks {', '.join(lacking)}")


def copying(subject: Subject) -> str:
    """Check that a deep copy of a model computes the same, with parameters of its own."""
    model = _model(subject)
    with evaluating(model):
        twin = copy.deepcopy(model)
        expected = _logits(model)
        expect(torch.equal(_logits(twin), expected), "a copy computes other logits")
        with torch.no_grad():
            for parameter in twin.residual.parameters():
                parameter.zero_()
        expect(torch.equal(_logits(model), expected), "a copy shares parameters with its original")
    return "parameters of its own"


MODEL_CHECKS: dict[str, Callable[[Subject], str]] = {
    "model": built,
    "training": training,
    "decoding": decoding,
    "saving": saving,
    "copying": copying,
}
