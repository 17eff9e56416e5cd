"""Find faults of a model with depth reads that no error tells: frozen queries, wrong optimizer groups, slow paths."""

import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from attnres.inspect.geometry import sharpness
from attnres.inspect.recording import Trace, find_residual, record
from attnres.ops import explain
from attnres.residuals import Residual
from attnres.residuals.regroup import is_muon
from attnres.text import listed, number

SATURATED = 20.0
"""Largest logit from which a softmax is called saturated: e^-20 is below the resolution of fp32."""
UNREAD = 0.005
"""Share of a read below which a source counts as not read."""
FULL_RATE = 0.5
"""Part of the model's learning rate from which queries count as training at the full rate; recommended is 0.1."""
CHECKPOINTED = ("gradient_checkpointing", "grad_checkpointing", "_checkpoint_wrapped_module")
"""Attributes by which Transformers, timm and torch's checkpoint wrapper mark modules whose layers are recomputed."""

FAULTS = {
    "frozen": (
        "depth reads stay as they are: at zero queries the plain model, only slower",
        "Set requires_grad_(True) on the residual's parameters (PEFT: modules_to_save=['residual'])",
    ),
    "16-bit": (
        "small updates of queries round to nothing",
        "Keep them in fp32: model.residual.float() after a conversion of the whole model",
    ),
    "tied": ("another model after saving and loading", "Call model.tie_weights(), or change the config"),
    "untied": ("another model after saving and loading", "Call model.tie_weights(), or change the config"),
    "not-optimised": (
        "they never train",
        "Build the optimizer after attach, or call attnres.regroup(optimizer, model)",
    ),
    "decayed": ("queries return to the plain mean", "Call attnres.regroup(optimizer, model)"),
    "muon": (
        "it makes the queries of different sublayers orthogonal to one another, which they have no reason to be",
        "Call attnres.regroup(optimizer, model)",
    ),
    "full-rate": (
        "the gain is lost within some million tokens (docs/results/index.md)",
        "Call attnres.regroup(optimizer, model), which gives them a tenth",
    ),
    "slowed-twice": ("queries hardly move", "Call attnres.regroup(optimizer, model), which leaves one of the two"),
    "saturated": (
        "such a softmax takes one source and passes almost no gradient",
        "Lower the learning rate of queries, or set read_temperature",
    ),
    "reentrant": (
        "training stops with an error: gradients of the depth stream's earlier sources would be lost",
        "Pass use_reentrant=False",
    ),
    "no-recompute": ("the memory that it should save", "Enable it on the layers, with use_reentrant=False"),
    "graph-break": ("part of the speed that compiling gives", "Remove hooks from the layers, or compile each layer"),
    "not-compiled": ("the speed that compiling gives", "Set torch._dynamo.config.suppress_errors = False to see why"),
    "no-gradient": (
        "they never train",
        "Does every layer take the stream that the layer before it gave? Detached or copied tensors end it",
    ),
    "stream-dtype": ("sums of outputs overflow at 65,504", "Use bf16, or autocast with an fp32 embedding"),
    "plain-torch": ("time and memory", "See attnres env"),
    "unread": ("layers whose work is lost", "attnres inspect MODEL --prune shows what goes without them"),
}
"""Name of a fault -> what it costs, and what to do."""


@dataclass(frozen=True)
class Finding:
    """One fault.

    Attributes:
        name: a word for programs, one of `FAULTS`.
        found: what was seen, with its numbers.
        cost: what it costs.
        advice: what to do.
    """

    name: str
    found: str
    cost: str
    advice: str

    @classmethod
    def of(cls, name: str, found: str) -> "Finding":
        """Return the fault `name` of `FAULTS`, with the observation that shows it."""
        return cls(name, found, *FAULTS[name])

    def __str__(self) -> str:
        return f"{self.name}: {self.found}. It costs: {self.cost}. {self.advice}"

    def to_dict(self) -> dict[str, str]:
        """Return the fields, for JSON."""
        return asdict(self)


def examine(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    example: Any = None,
) -> list[Finding]:
    """Return the faults of a model with depth reads, of its optimizers, and of a training pass; none if it is healthy.

    Weights, gradients, the random state and the model's mode are as before afterwards.

    Args:
        model: built, converted, attached, or a module of your own with `DepthReads` or `make_residual`.
        optimizer: the optimizers that train it, or one; None leaves out what they could do wrong.
        example: arguments of one forward pass: token ids, a tuple, or by name a mapping. With it a forward and a
            backward pass are made, and gradients, recomputation, compilation and what is read are examined too.

    Raises:
        UserError: the model has no depth reads.

    Example:
        >>> import torch, attnres
        >>> from torch import nn
        >>> layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        >>> model = nn.TransformerEncoder(layer, 4, nn.LayerNorm(16), enable_nested_tensor=False)
        >>> x = torch.randn(1, 3, 16)
        >>> _ = attnres.attach(model, "full", example=(x,))
        >>> [finding.name for finding in examine(model, torch.optim.AdamW(model.parameters(), weight_decay=0.1))]
        ['decayed']
    """
    residual = find_residual(model)
    optimizers = [] if optimizer is None else [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    findings = [*_parameters(model, residual), *_optimizers(model, residual, list(optimizers)), *_queries(residual)]
    if example is not None:
        findings += _passes(model, residual, example)
    return findings


def _names(residual: Residual, chosen: Callable[[nn.Parameter], bool]) -> list[str]:
    return [name for name, parameter in residual.named_parameters() if chosen(parameter)]


def _parameters(model: nn.Module, residual: Residual) -> Iterator[Finding]:
    """Yield faults of the parameters themselves: frozen, in 16 bits, tied or untied against the config."""
    frozen = _names(residual, lambda parameter: not parameter.requires_grad)
    if frozen and any(parameter.requires_grad for parameter in model.parameters()):
        yield Finding.of("frozen", f"{listed(frozen)} of the residual without gradient, while other parameters train")
    short = _names(residual, lambda parameter: parameter.dtype in (torch.float16, torch.bfloat16))
    if short:
        yield Finding.of("16-bit", f"{listed(short)} of the residual are stored in 16 bits")
    config = getattr(model, "config", None)
    ends = [getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
    weights = [getattr(end, "weight", None) for end in ends]
    says = getattr(config, "tie_word_embeddings", None)
    if says is not None and all(isinstance(weight, Tensor) for weight in weights):
        is_tied = weights[0] is weights[1]
        if is_tied != bool(says):
            yield Finding.of(
                "tied" if is_tied else "untied",
                f"embedding and head are {'one tensor' if is_tied else 'two tensors'}, and the config says "
                f"tie_word_embeddings={bool(says)}",
            )


def _optimizers(model: nn.Module, residual: Residual, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Finding]:
    """Yield faults of the optimizers' groups that hold the residual's parameters."""
    if not optimizers:
        return
    names = {id(parameter): name for name, parameter in residual.named_parameters()}
    slow = {id(parameter) for name, parameter in residual.named_parameters() if name in residual.slow}
    groups = [(one, group) for one in optimizers for group in one.param_groups]
    seen = {id(parameter) for _, group in groups for parameter in group["params"]}
    missing = [names[id(p)] for p in residual.parameters() if p.requires_grad and id(p) not in seen]
    if missing:
        yield Finding.of("not-optimised", f"{listed(missing)} of the residual are in no group of the optimizer")
    decayed: list[str] = []
    orthogonal: list[str] = []
    fast: list[str] = []
    twice: list[str] = []
    # Rates of everything else: AdamW's where the model has Muon besides, whose rates mean something else.
    others = [
        group["lr"]
        for one, group in groups
        if not is_muon(one, group) and any(id(parameter) not in names for parameter in group["params"])
    ]
    for one, group in groups:
        of_residual = [parameter for parameter in group["params"] if id(parameter) in names]
        if is_muon(one, group):
            orthogonal += [names[id(parameter)] for parameter in of_residual]
            continue
        decayed += [names[id(parameter)] for parameter in of_residual if group.get("weight_decay")]
        if not others or not float(max(others)):
            continue
        queries = [names[id(parameter)] for parameter in of_residual if id(parameter) in slow]
        relative, carried = float(group["lr"]) / float(max(others)), float(getattr(residual, "query_lr", 1.0))
        if relative * carried >= FULL_RATE and getattr(model, "conversion", None) is None:
            fast += queries
        if relative < FULL_RATE and carried < FULL_RATE:
            twice += queries
    if decayed:
        yield Finding.of("decayed", f"weight decay pulls at {listed(decayed)}")
    if orthogonal:
        yield Finding.of("muon", f"Muon trains {listed(orthogonal)}")
    if fast:
        yield Finding.of("full-rate", f"{listed(fast)} train at the model's full learning rate")
    if twice:
        yield Finding.of(
            "slowed-twice", f"{listed(twice)} have a group with a lower rate, and the setting query_lr slows them too"
        )


def _queries(residual: Residual) -> Iterator[Finding]:
    """Yield reads whose softmax can saturate."""
    largest = [(value or 0.0, read.name) for value, read in zip(sharpness(residual) or [], residual.layout())]
    far = sorted((pair for pair in largest if pair[0] > SATURATED), reverse=True)
    if far:
        yield Finding.of(
            "saturated", f"queries of {listed([name for _, name in far[:5]])} allow logits up to {number(far[0][0], 1)}"
        )


# ------------------------------------------------------------------ a pass


def _passes(model: nn.Module, residual: Residual, example: Any) -> list[Finding]:
    """Return the faults that a forward and a backward pass show."""
    args, kwargs = (), {}
    if isinstance(example, Mapping):
        kwargs = dict(example)
    else:
        args = example if isinstance(example, tuple) else (example,)
    parameters = list(model.parameters())
    before = [parameter.grad for parameter in parameters]
    buffers = {name: copy.copy(buffer) for name, buffer in model.named_buffers()}
    modes = [(module, module.training) for module in model.modules()]
    state = torch.get_rng_state()
    for parameter in parameters:
        parameter.grad = None
    try:
        model.train()
        findings = list(_trained(model, residual, lambda: model(*args, **kwargs)))  # first: recording breaks graphs too
        model.eval()
        with torch.no_grad(), record(model) as trace:
            model(*args, **kwargs)
        return [*findings, *_read(residual, trace)]
    finally:
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        for module, mode in modes:
            module.training = mode
        torch.set_rng_state(state)


@dataclass(frozen=True)
class _TrainingPass:
    """Observations of a forward and a backward pass.

    Attributes:
        stream: the first hidden state that the residual was given, None where it never started.
        flagged: modules that say that their layers are checkpointed.
        forward, recomputed: calls of modules in those, in the forward and in the backward pass.
        breaks: reasons of graph breaks. uncompiled: frames that torch.compile gave up.
    """

    stream: Tensor | None
    flagged: tuple[nn.Module, ...]
    forward: int
    recomputed: int
    breaks: tuple[str, ...]
    uncompiled: int


def _trained(model: nn.Module, residual: Residual, call: Callable[[], Any]) -> Iterator[Finding]:
    """Yield the faults that a training pass shows. With reentrant checkpointing, which a depth stream refuses, no pass
    is made."""
    flagged = tuple(one for one in model.modules() if any(getattr(one, name, False) for name in CHECKPOINTED))
    options = [getattr(getattr(one, "_gradient_checkpointing_func", None), "keywords", {}) for one in flagged]
    if any(option.get("use_reentrant") for option in options):
        yield Finding.of("reentrant", "activation checkpointing is reentrant")
        return
    seen = _training_pass(residual, flagged, call)
    if seen is None:
        return
    if seen.forward and not seen.recomputed:
        yield Finding.of("no-recompute", "activation checkpointing is on, and backward recomputes no layer")
    if seen.breaks:
        yield Finding.of("graph-break", f"torch.compile breaks the graph: {seen.breaks[0].splitlines()[0][:160]}")
    if seen.uncompiled:
        yield Finding.of("not-compiled", f"torch.compile gave up {seen.uncompiled} frames, which run as they are")
    yield from (*_gradients(residual), *_stream(residual, seen))


def _training_pass(residual: Residual, flagged: tuple[nn.Module, ...], call: Callable[[], Any]) -> _TrainingPass | None:
    """Run the pass; return None where its output needs no gradient."""
    starts: list[Tensor] = []
    calls = [0]
    start, own = residual.start, vars(residual).get("start")  # somebody may have put one in its place already

    def begun(embedding: Tensor) -> Any:
        starts.append(embedding.detach())
        return start(embedding)

    def counted(*_: Any) -> None:
        calls[0] += 1

    # Where a whole model is flagged, its layers are what it recomputes.
    inside = {id(part): part for module in flagged for part in module.modules() if not list(part.children())}
    breaks, uncompiled = _compiler_counts()
    residual.start = begun
    # Before the call: torch stops a recomputation as soon as it has what backward needs, within a module's forward.
    hooks = [part.register_forward_pre_hook(counted) for part in inside.values()]
    try:
        loss = sum(value.float().square().mean() for value in _floats(call()))
        forward, calls[0] = calls[0], 0
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            return None
        loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
        del residual.start
        if own is not None:
            residual.start = own
    after, given_up = _compiler_counts()
    stream = starts[0] if starts else None
    return _TrainingPass(stream, flagged, forward, calls[0], tuple(after - breaks), given_up - uncompiled)


def _gradients(residual: Residual) -> Iterator[Finding]:
    """Yield parameters of the residual that the backward pass did not reach."""
    trains = {name for name, parameter in residual.named_parameters() if parameter.requires_grad}
    silent = [name for name, parameter in residual.named_parameters() if name in trains and parameter.grad is None]
    grad, layout = getattr(getattr(residual, "query", None), "grad", None), residual.layout()
    if "query" in trains and isinstance(grad, Tensor) and len(grad) == len(layout):
        pairs = zip(layout, grad, strict=True)  # a read of one source has no choice, and its query no gradient
        silent += [f"the query of {read.name}" for read, row in pairs if len(read.sources) > 1 and not row.any()]
    if silent:
        yield Finding.of("no-gradient", f"{listed(silent)} of the residual got no gradient")


def _stream(residual: Residual, seen: _TrainingPass) -> Iterator[Finding]:
    """Yield faults of the hidden state: its dtype, and reads that no kernel computes."""
    if seen.stream is None:
        return
    if seen.stream.dtype == torch.float16:
        yield Finding.of("stream-dtype", "the stream is in fp16")
    if residual.traits.has_query:
        plan = explain([seen.stream.flatten(0, -2)] * min(8, residual.num_sublayers), training=True)
        if plan.backend == "eager":
            yield Finding.of("plain-torch", f"reads run in plain torch: {plan.reasons[0]}")


def _read(residual: Residual, trace: Trace) -> Iterator[Finding]:
    """Yield sources that no read takes. A residual without parameters or with zero queries has none."""
    if not [*residual.parameters()] or (residual.traits.has_query and not any(sharpness(residual) or [])):
        return
    shares: dict[str, float] = {}
    for read, row in zip(residual.layout(), trace.contribution or [], strict=False):
        for source, share in zip(read.sources, row, strict=True):
            shares[source.name] = max(shares.get(source.name, 0.0), abs(share))
    unread = [name for name, share in shares.items() if share < UNREAD]
    if unread:
        yield Finding.of("unread", f"no read takes as much as {UNREAD:.1%} from {listed(unread)}")


def _floats(output: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors of a model's output: the logits alone where it names them."""
    logits = getattr(output, "logits", None)
    values: Iterable[Any] = [logits] if isinstance(logits, Tensor) else _pytree.tree_leaves(output)
    yield from (value for value in values if isinstance(value, Tensor) and value.is_floating_point())


def _compiler_counts() -> tuple[Counter[str], int]:
    """Return the reasons of torch.compile's graph breaks so far and the frames that it gave up; to import it would take
    seconds."""
    if "torch._dynamo" not in sys.modules:
        return Counter(), 0
    counters = sys.modules["torch._dynamo"].utils.counters
    return Counter(counters["graph_break"]), counters["frames"]["total"] - counters["frames"]["ok"]
