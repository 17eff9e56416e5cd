"""Checks of a mechanism's declarations, without a forward pass."""

import inspect
import math
import re

import torch

from attnres.residuals.base import Residual
from attnres.residuals.check.subject import WIDTH, Subject, expect
from attnres.residuals.layout import Traits
from attnres.residuals.registry import make_residual, settings_of

_AXES = ("read", "sublayer", "layer", "source", "stream")
TAKEN = ("kind", "step", "output_rms", "input_rms", "grad_rms", "entropy", "sharpness")
"""Keys of a line of a run's metrics, which learned tables may therefore not use as names."""


def interface(subject: Subject) -> str:
    """Check that it has a name, traits, all methods, and a docstring with a formula or a source."""
    mechanism = subject.mechanism
    for verb in ("start", "read", "write", "hidden_state"):
        expect(getattr(mechanism, verb) is not getattr(Residual, verb), f"{verb} is not defined")
    classes = mechanism.__mro__[: mechanism.__mro__.index(Residual)]
    expect(bool(mechanism.__doc__), "the class has no docstring")
    text = "\n".join(cls.__doc__ or "" for cls in classes)
    documented = re.search(r"[=~]|Source:|arXiv|https?://", text)
    expect(documented is not None, "the docstring has neither a formula (h_l = ...) nor a source")
    residual = subject.residual()
    expect(isinstance(residual.traits, Traits), f"traits of the instance are {residual.traits!r}")
    colour = residual.traits.colour
    expect(colour is None or re.fullmatch("#[0-9a-f]{6}", colour) is not None, f"colour {colour!r} is no '#rrggbb'")
    scale = residual.branch_scale()
    expect(math.isfinite(scale) and scale > 0, f"branch_scale is {scale!r}, not a positive number")
    return f"'{mechanism.name}', {mechanism.__name__} in {mechanism.__module__}"


def settings(subject: Subject) -> str:
    """Check that every constructor argument after `width` is a keyword with a default."""
    mechanism = subject.mechanism
    first, *others = list(inspect.signature(mechanism).parameters.values())
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    names = [first.name, *(p.name for p in others if p.kind not in kinds)]
    expect(
        names == ["num_sublayers", "width"],
        f"the constructor takes ({', '.join(names)}), not (num_sublayers, width, *, settings)",
    )
    defaults = settings_of(mechanism.name)
    missing = [name for name, default in defaults.items() if default is inspect.Parameter.empty]
    expect(not missing, f"setting '{''.join(missing[:1])}' has no default")
    for depth in (1, 2, 5, 8):
        make_residual(mechanism.name, depth, WIDTH)
    return ", ".join(defaults) or "none"


def start_values(subject: Subject) -> str:
    """Check that `init_parameters` gives every parameter its start value, in fp32, and that the meta device needs no
    memory."""
    count = 0
    for depth in subject.depths:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            residual = make_residual(subject.mechanism.name, depth, WIDTH, **subject.settings)
            before = {name: parameter.detach().clone() for name, parameter in residual.named_parameters()}
            with torch.no_grad():
                for parameter in residual.parameters():
                    parameter.fill_(torch.nan)
            torch.manual_seed(0)
            residual.init_parameters()
        for name, parameter in residual.named_parameters():
            expect(parameter.dtype is torch.float32, f"{name} is {parameter.dtype}, not fp32")
            expect(bool(before[name].isfinite().all()), f"{name} does not start at finite numbers")
            expect(torch.equal(parameter, before[name]), f"init_parameters does not set {name} to where it started")
        with torch.device("meta"):
            blank = make_residual(subject.mechanism.name, depth, WIDTH, **subject.settings)
        real = [name for name, parameter in blank.named_parameters() if not parameter.is_meta]
        expect(not real, f"{''.join(real[:1])} takes memory on the meta device: make it with torch.empty")
        count = sum(parameter.numel() for parameter in residual.parameters())
    return f"{count:,} parameters at {subject.depth} sublayers of width {WIDTH}"


def learned(subject: Subject) -> str:
    """Check that its learned tables are fp32 on the CPU, have unused names, as many axes as dimensions, and as many
    rows as the axes say."""
    names: list[str] = []
    for depth in subject.depths:
        residual = subject.residual(depth)
        tables, reads = residual.learned(), len(residual.layout())
        for name, table in tables.items():
            values, axes = table.values, table.axes
            expect(values.dtype is torch.float32 and values.device.type == "cpu", f"'{name}' is not fp32 on the CPU")
            expect(not values.requires_grad, f"'{name}' carries a gradient")
            expect(values.dim() == len(axes), f"'{name}' has {values.dim()} dimensions and axes {axes}")
            unknown = [axis for axis in axes if axis not in _AXES]
            expect(not unknown, f"'{name}' has an axis {unknown[:1]}: expected of {', '.join(_AXES)}")
            for axis, size in zip(axes, values.shape):
                sizes = {"read": (reads - 1, reads), "sublayer": (depth,)}.get(axis, (size,))
                expect(size in sizes, f"'{name}' has {size} entries along '{axis}' of {depth} sublayers")
            expect(bool(name and table.title), f"'{name}' has no name or no title")
            expect(name not in TAKEN, f"'{name}' is the name of something else in a run's metrics")
        names = list(tables)
    return ", ".join(names) or "none"
