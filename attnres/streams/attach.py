"""Give the layers of any PyTorch Transformer depth reads, in place."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from attnres.errors import UserError, first_line
from attnres.head import evaluating
from attnres.ops.devices import forked_generators
from attnres.residuals import Residual, make_residual, residual_class, settings_of
from attnres.streams.find import Found, NoFitError, find_layers, find_reads
from attnres.streams.layers import attach_stream, kinds_of
from attnres.streams.meta import wait_for_values
from attnres.streams.switches import detach

_BOUND, _BOUND_16 = 1e-4, 0.1
"""Largest accepted change of outputs, relative to the largest output: rounding in fp32, and in 16 bits."""
_WHOLE = "norms=None gives every layer one read, whatever is inside of it"


def attach(
    module: nn.Module,
    residual: str = "block",
    *,
    example: Any = None,
    layers: str | None = None,
    norms: Sequence[str] | Literal["auto"] | None = "auto",
    final_norm: str | Literal["auto"] | None = "auto",
    sublayers: Sequence[str] | None = None,
    width: int | None = None,
    read_scale: Literal["sum", "mean"] = "sum",
    tuples: bool = False,
    **settings: Any,
) -> Residual:
    """Let the layers of a module read and write a depth stream, in place. Needs no library but torch.

    >>> import torch
    >>> from torch import nn
    >>> layer = nn.TransformerEncoderLayer(16, 2, 32, norm_first=True, batch_first=True)
    >>> encoder = nn.TransformerEncoder(layer, 4, nn.LayerNorm(16), enable_nested_tensor=False)
    >>> attach(encoder, "full", example=(torch.randn(1, 3, 16),)).query.shape
    torch.Size([9, 16])

    Layers keep their own code. Two kinds can have depth reads:

    - pre-norm layers, `x = x + f(norm(x))` once for each sublayer, with whatever scales `f` or the normed vector. Every
      norm becomes a read;
    - with `norms=None` any layer that gives a vector of the width that it takes (parallel, post-norm or fused layers).
      It has one read, and what it writes is f(h) = layer(h) - h.

    With a mechanism that starts as the standard residual the module then computes the same as before, exactly if
    `read_scale` is "sum".

    Args:
        module: the module to change; the new parameters are `module.residual`.
        residual: a mechanism's name, or FILE.py:CLASS; `settings` are its settings. "standard" ignores those of
            "block", so that one word of a config turns depth reads off.
        example: arguments of one forward pass, a tuple or, by name, a mapping. A pass with it finds layers, norms,
            final norm and width if they are not given, and another compares the outputs before and after.
        layers: path in `module` of the list (or dict) of layers; without an example "layers".
        norms: paths in a layer of the norms that read the stream, in the order of the calls; without an example
            ("norm1", "norm2"). None: one read a layer.
        final_norm: path in `module` of the norm after the last layer, without an example "norm"; None if the layers'
            output is used without a norm, which is the default with `norms=None`.
        sublayers: kinds of the sublayers, one for each norm, by default attention and MLP: for figures, and for
            mechanisms that treat an "mlp" differently.
        width: width of the stream, if neither an example nor the first norm gives it.
        tuples: layers pass on tuples of tensors, which the module's code between layers must accept: for
            `torch.utils.checkpoint` in its forward under `torch.compile`. Layers in a checkpoint wrapper, and those of
            Transformers, do so when needed.

    Returns:
        The residual. If it is on the meta device, initialise it with the rest of the module: `reset_parameters`, or a
        state dict.

    Raises:
        UserError: layers of another form, wrong paths, a module that has a residual already or another attribute of
            that name, unknown names, impossible settings, a mechanism that needs other start values of the layers. The
            module is then unchanged.
    """
    _refuse_taken(module)
    name = residual_class(residual).name
    known_settings = settings_of(name)
    # other people's optimizers have one learning rate for all: None is 0.1 where queries need it
    defaults = {"read_scale": read_scale, "query_lr": None}
    settings = {key: value for key, value in defaults.items() if key in known_settings} | settings
    run = None if example is None else _Example(module, example)
    layers, places = _find(module, layers, norms, final_norm, run)
    part = _part(module, layers)
    stack = [layer for layer in part._modules.values() if isinstance(layer, nn.Module)]
    if not stack:
        raise UserError(f"'{layers}' of {type(module).__name__} holds no layers: name the list of its layers")
    first, *_ = [_part(layer, path) for layer in stack for path in places.reads] or [None]
    if places.final_norm is not None:
        _part(module, places.final_norm)
    kinds = _kinds(places.reads, sublayers, counted=run is not None)
    connection = _residual(name, stack, kinds, width or places.width or _width(first), settings)
    connection.train(module.training)
    wait_for_values(connection)
    parts = attach_stream(module, connection, stack, places.reads, places.final_norm, normed=places.normed)
    parts.attached, parts.tuples = True, tuples
    if run is not None:
        # exact up to the eps of norms
        exact = settings.get("read_scale") != "mean" or not (places.normed and places.reads)
        try:
            run.compare(compared=connection.traits.starts_standard and exact)
        except UserError:
            detach(module)
            raise
    return connection


def _kinds(reads: Sequence[str], sublayers: Sequence[str] | None, *, counted: bool) -> tuple[str, ...]:
    """Return the kinds of a layer's sublayers. Norms that no pass `counted` are an attention's and an MLP's."""
    kinds = tuple(sublayers or kinds_of(len(reads) if counted or not reads else 2))
    if len(kinds) != (len(reads) or 1):
        raise UserError(f"{len(reads)} norms and {len(kinds)} sublayers were given: one kind for each norm is expected")
    return kinds


def _residual(
    name: str, stack: Sequence[nn.Module], kinds: Sequence[str], width: int, settings: Mapping[str, Any]
) -> Residual:
    """Return a new residual on the device of the layers. Raises UserError for one that needs more of them than norms
    and additions."""
    with torch.device(next(stack[0].parameters(), torch.empty(0)).device):
        residual = make_residual(name, len(stack) * len(kinds), width, sublayers=kinds, **settings).float()
    if residual.value_kind != "none":
        raise UserError(
            f"value_residual is '{residual.value_kind}', and attach does not know where a module's attention "
            "computes its values: leave it out"
        )
    if residual.branch_scale() != 1.0:
        raise UserError(
            f"residual '{name}' scales the start values of a layer's branches, and attach does not know those "
            "weights: choose another residual"
        )
    return residual


# ---------------------------------------------------------------------------------------------- what is found by a pass


class _Example:
    """One forward pass of a module, and its outputs before depth reads were attached."""

    def __init__(self, module: nn.Module, example: Any) -> None:
        self.module = module
        self.args: tuple[Any, ...] = tuple(example) if isinstance(example, tuple | list) else (example,)
        self.kwargs: dict[str, Any] = {}
        if isinstance(example, Mapping):
            self.args, self.kwargs = (), dict(example)
        try:
            self.before = self._tensors()
        except Exception as error:
            raise UserError(
                f"{type(module).__name__} does not run on the example ({first_line(error)}): give the arguments of one "
                "forward pass, as a tuple or by name"
            ) from error

    def run(self) -> Any:
        # the module may change them in place
        args, kwargs = _pytree.tree_map_only(Tensor, Tensor.clone, (self.args, self.kwargs))
        return self.module(*args, **kwargs)

    def _tensors(self) -> list[Tensor]:
        """Return the floating-point outputs of a pass in evaluation mode, with the same random numbers each time."""
        devices = {one.device for one in self.module.parameters()}
        with evaluating(self.module), torch.no_grad(), forked_generators(devices):
            torch.manual_seed(0)
            leaves = _pytree.tree_leaves(self.run())
        return [one for one in leaves if isinstance(one, Tensor) and one.is_floating_point() and not one.is_meta]

    def width_at(self, layer: nn.Module) -> int:
        """Return the width of a layer's input. Raises UserError if the pass does not call the layer."""
        widths: list[int] = []

        def note(layer: nn.Module, args: tuple, kwargs: dict) -> None:
            state = args[0] if args else kwargs.get("hidden_states")
            if isinstance(state, Tensor):
                widths.append(state.shape[-1])

        with ExitStack() as stack:
            stack.callback(layer.register_forward_pre_hook(note, with_kwargs=True).remove)
            self._tensors()
        if not widths:
            raise UserError(
                f"the first {type(layer).__name__} gets no hidden state in a forward pass of "
                f"{type(self.module).__name__}, as its first argument or as hidden_states: name the list of its layers"
            )
        return widths[0]

    def compare(self, *, compared: bool) -> None:
        """Run the pass with depth reads.

        Raises:
            UserError: the pass fails or, if `compared`, its outputs differ from before.
        """
        name = type(self.module).__name__
        try:
            after = self._tensors()
        except Exception as error:
            raise UserError(f"{name} does not run with depth reads there ({first_line(error)}): {_WHOLE}") from error
        for one, other in zip(self.before, after, strict=True) if compared else ():
            scale = one.abs().max().item() if one.numel() else 0.0
            difference = (one - other).abs().max().item() if one.numel() else 0.0
            bound = _BOUND if one.dtype in (torch.float32, torch.float64) else _BOUND_16
            if not difference <= bound * scale:
                raise UserError(
                    f"{name} would compute something else with depth reads there: outputs differ by {difference:.2g} "
                    f"of {scale:.3g}, where at most {bound:.0e} of that is rounding: {_WHOLE}"
                )


def _find(
    module: nn.Module,
    layers: str | None,
    norms: Sequence[str] | Literal["auto"] | None,
    final_norm: str | Literal["auto"] | None,
    run: _Example | None,
) -> tuple[str, Found]:
    """Return the path of the layers, and where they read: as given, else found by an example pass, else the
    defaults."""
    name = type(module).__name__
    if run is None:
        reads = ("norm1", "norm2") if norms == "auto" else tuple(norms or ())
        final = ("norm" if reads else None) if final_norm == "auto" else final_norm
        return layers or "layers", Found(reads, True, final, 0)
    try:
        path = find_layers(module) if layers is None else layers
        stack = list(_part(module, path)._modules.values())
        if norms is None or (norms != "auto" and final_norm != "auto"):
            final = None if final_norm == "auto" else final_norm
            return path, Found(tuple(norms or ()), True, final, run.width_at(stack[0]))
        places = find_reads(module, stack, run.run, strict=False, counts=range(1, 9))
    except NoFitError as reason:
        raise UserError(
            f"where {name} reads its hidden state is not found: it {reason}; name the norms, or {_WHOLE}"
        ) from None
    if norms != "auto":
        places = places._replace(reads=tuple(norms), normed=True)
    return path, places if final_norm == "auto" else places._replace(final_norm=final_norm)


def _refuse_taken(module: nn.Module) -> None:
    """Refuse a module that has a residual, or that was compiled."""
    taken, name = getattr(module, "residual", None), type(module).__name__
    if isinstance(taken, Residual):
        raise UserError(f"{name} has a residual already: attach it once")
    if hasattr(module, "residual"):
        raise UserError(
            f"{name} calls a {type(taken).__name__} of its own 'residual', which is the name of the depth stream's "
            "residual: rename it first"
        )
    compiled = [path or name for path, one in module.named_modules() if "_orig_mod" in one._modules]
    if compiled:
        raise UserError(f"{compiled[0]} is compiled already: attach first, then compile")


def _part(module: nn.Module, path: str) -> Any:
    try:
        part: Any = module.get_submodule(path)
    except AttributeError:
        part = None
    if part is None:
        raise UserError(
            f"{type(module).__name__} has no '{path}': print the module to see the names of its parts, or give "
            "example=(the arguments of a forward pass), by which they are found"
        )
    return part


def _width(norm: nn.Module | None) -> int:
    """Return the width of a norm's input."""
    shape = getattr(norm, "normalized_shape", None) or getattr(getattr(norm, "weight", None), "shape", None)
    if not shape:
        what = "without norms nothing says" if norm is None else f"a {type(norm).__name__} does not say"
        raise UserError(f"{what} how wide the stream is: give width, or an example")
    return shape[-1]
