"""What every code base is measured by. A test gives its own model, how depth reads get into it, and one pass."""

import copy
import importlib.util
import io
import json
import re
import subprocess
import sys
import types
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.nn import functional

import attnres
from attnres.inspect import Ablate, TextModel, examine
from attnres.residuals.regroup import is_muon

RESIDUALS: dict[str, dict[str, Any]] = {"block": {"num_blocks": 2}, "full": {}}


class Subject(NamedTuple):
    """A model of another code base.

    build: makes it, with the same weights each time, none of them at a start value that would hide a difference.
    connect: `connect(model, residual, **settings)` gives it depth reads and returns it, or another model.
    run: one pass in training mode; gives outputs and loss.
    """

    build: Callable[[], nn.Module]
    connect: Callable[..., nn.Module]
    run: Callable[[nn.Module], tuple[Tensor, Tensor]]

    def connected(self, residual: str = "block", **settings: Any) -> nn.Module:
        return self.connect(self.build(), residual, **(settings or RESIDUALS.get(residual, {})))

    def random_queries(self, residual: str = "block") -> nn.Module:
        """Make a model whose reads are far from the standard residual's."""
        model = self.connected(residual)
        with torch.no_grad():
            reads(model).query.copy_(torch.randn(reads(model).query.shape, generator=torch.Generator().manual_seed(5)))
        return model


def attached(*example: Any, **options: Any) -> Callable[..., nn.Module]:
    """Return a `connect` that is one call of `attnres.attach`."""

    def connect(model: nn.Module, residual: str, **settings: Any) -> nn.Module:
        attnres.attach(model, residual, example=example, **options, **settings)
        return model

    return connect


def language_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def spread(model: nn.Module, seed: int = 1, scale: float = 0.05) -> nn.Module:
    """Add noise to every parameter: branches that start at zero would compute nothing."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=g))
    return model


def reads(model: nn.Module) -> attnres.Residual:
    return next(module for module in model.modules() if isinstance(module, attnres.Residual))


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference as a part of the largest value."""
    largest = (ours - theirs).abs().max().item()
    return largest / theirs.abs().max().item() if largest else 0.0


def one_pass(subject: Subject, model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Return outputs, and gradients by the names of parameters, wrappers of compilers and checkpoints left out."""
    model.zero_grad()
    outputs, loss = subject.run(model)
    loss.backward()
    names = {re.sub(r"(_orig_mod|_checkpoint_wrapped_module)\.", "", name): p for name, p in model.named_parameters()}
    return outputs.detach(), {name: p.grad.clone() for name, p in names.items() if p.grad is not None}


def compare(one: tuple[Tensor, dict[str, Tensor]], other: tuple[Tensor, dict[str, Tensor]]) -> tuple[float, float]:
    """Return the distance of outputs, and the worst of the gradients that `other` has.

    Gradients are measured by their largest value, or by a thousandth of the largest of all: that of a key's bias is
    zero but for rounding.
    """
    assert set(other[1]) <= set(one[1])
    least = 1e-3 * max(grad.abs().max().item() for grad in other[1].values())
    far = {name: (one[1][name] - grad).abs().max().item() for name, grad in other[1].items()}
    return distance(one[0], other[0]), max(far[name] / max(g.abs().max().item(), least) for name, g in other[1].items())


def tell(pair: Iterable[float]) -> str:
    return ", ".join(f"{value:.1e}" if value else "0" for value in pair)


def zero_queries(subject: Subject, note: Callable) -> None:
    """With zero queries the model computes what it computes without reads, and so does "standard"."""
    plain = one_pass(subject, subject.build())
    switched = compare(one_pass(subject, subject.connected("standard", num_blocks=2)), plain)
    worst = (0.0, 0.0)
    for residual in RESIDUALS:
        model = subject.connected(residual)
        ours = one_pass(subject, model)
        worst = tuple(map(max, worst, compare(ours, plain)))
        query = reads(model).query.grad
        assert query is not None and query[1:].abs().amax(1).gt(0).sum() >= len(query) // 2, "queries have no gradients"
    assert worst[0] < 3e-6 and worst[1] < 5e-5 and max(switched) < 5e-5
    note("off-switch", "bit-equal" if not any(switched) else tell(switched))
    note("zero queries: outputs, gradients", tell(worst))


def switches(subject: Subject) -> None:
    """A plain checkpoint loads; `disabled` and `detach` give the model that there was."""
    plain = subject.build()
    before = one_pass(subject, plain)
    model = subject.random_queries()
    attnres.load_plain(model, plain.state_dict())
    assert reads(model).query.abs().max() > 0
    assert distance(one_pass(subject, model)[0], before[0]) > 1e-3
    with attnres.disabled(model):
        assert max(compare(one_pass(subject, model), before)) == 0
    attnres.detach(model)
    assert max(compare(one_pass(subject, model), before)) == 0
    assert set(model.state_dict()) == set(plain.state_dict())


def group_of(optimizer: Any, parameter: Tensor) -> dict[str, Any]:
    return next(group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))


def groups(optimizer: Any, model: nn.Module) -> str:
    """Regroup an optimizer that the code base made. Queries do not decay, and move at a tenth of the rate: what doctor
    finds before it finds no more.

    Returns:
        What the optimizer did to queries before.
    """
    residual = reads(model)
    before = group_of(optimizer, residual.query)
    decay, lr, count = before.get("weight_decay", 0.0), before["lr"], len(list(model.parameters()))
    found = {finding.name for finding in examine(model, optimizer)}
    muon = is_muon(optimizer, before)
    assert ("muon" in found) == muon and ("decayed" in found) == (bool(decay) and not muon)
    attnres.regroup(optimizer, model)
    attnres.regroup(optimizer, model)
    assert not examine(model, optimizer)
    for parameter in (residual.query, residual.gain):
        group = group_of(optimizer, parameter)
        assert group["weight_decay"] == 0 and not group.get("use_muon", False)
        assert abs(group["lr"] * residual.query_lr / lr - 0.1) < 1e-9
    assert sum(len(group["params"]) for group in optimizer.param_groups) == count
    return f"decayed queries at {decay:g}" if decay else "no decay of queries"


def ten_steps(subject: Subject, model: nn.Module, optimizer: Any, steps: int = 10) -> None:
    """Train on one batch: the loss falls, queries move."""
    query = reads(model).query.detach().clone()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = subject.run(model)[1]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert not torch.equal(reads(model).query, query)


def resumes(subject: Subject, make_optimizer: Callable[[nn.Module], Any]) -> None:
    """Three steps, a file, two steps more: the same as five in one go, to the bit."""
    model = subject.connected()
    optimizer = make_optimizer(model)
    ten_steps(subject, model, optimizer, 3)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    again = subject.connected()
    other = make_optimizer(again)
    state = torch.load(file, weights_only=True)
    again.load_state_dict(state["model"])
    other.load_state_dict(state["optimizer"])
    ten_steps(subject, model, optimizer, 2)
    ten_steps(subject, again, other, 2)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))


def compiled(subject: Subject, model: nn.Module) -> str:
    """Compile the whole model without graph breaks and compare with the same model as it is."""
    eager = one_pass(subject, model)
    torch._dynamo.reset()
    pair = compare(one_pass(subject, torch.compile(model, backend="aot_eager", fullgraph=True)), eager)
    assert pair[0] < 1e-5 and pair[1] < 1e-4
    return f"fullgraph {tell(pair)}"


def checkpointed(subject: Subject, model: nn.Module, layers: Iterable[nn.Module], compile_layers: bool = False) -> str:
    """Run the layers again in backward, each compiled without graph breaks where that is asked for."""
    eager, layers = one_pass(subject, model), list(layers)
    apply_activation_checkpointing(model, check_fn=lambda module: any(module is one for one in layers))
    if compile_layers:
        torch._dynamo.reset()
        for module in [one for one in model.modules() if hasattr(one, "_checkpoint_wrapped_module")]:
            module.compile(backend="aot_eager", fullgraph=True)
    pair = compare(one_pass(subject, model), eager)
    assert pair[0] < 1e-5 and pair[1] < 1e-4
    return tell(pair)


def tools(subject: Subject, note: Callable) -> None:
    """`record` sees every read of the model, `intervene` changes it, and after both it is as before. `examine` finds
    decay, and nothing in a model as it starts."""
    start = subject.connected()
    told = [
        {finding.name for finding in examine(_Pass(subject, start), optimizer, ())} - {"plain-torch"}
        for optimizer in (None, torch.optim.AdamW(start.parameters(), weight_decay=0.1))
    ]
    assert not told[0] and "decayed" in told[1]
    model = subject.random_queries("full")
    before = subject.run(model)[0].detach()
    with attnres.record(model) as trace, torch.no_grad():
        subject.run(model)
    rows = [torch.as_tensor(row) for row in trace.weights]
    assert len(rows) == len(reads(model).layout()) and trace.tokens > 0
    assert all(abs(float(row.sum()) - 1) < 1e-4 for row in rows)
    with attnres.intervene(model, Ablate("embedding", reads="output")):
        edited = subject.run(model)[0].detach()
    assert distance(edited, before) > 1e-3
    assert distance(subject.run(model)[0].detach(), before) == 0
    note("record, intervene", "both")


def explored(subject: Subject, logits: Callable[[nn.Module], Callable[[Tensor], Tensor]] | None = None) -> None:
    """The explorer opens the model, of token ids, and shows a text that it is given.

    Args:
        logits: makes of the model the function from ids to logits; None where that is the model itself.
    """
    model = subject.random_queries()
    given = model if logits is None else TextModel(model, logits(model))
    with attnres.explore(given, text=[3, 1, 4, 1, 5]) as page:
        body = json.dumps({"view": None, "link": ""}).encode()
        request = urllib.request.Request(f"{page.url}/show", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            shown = json.loads(answer.read().splitlines()[-1])
    assert shown["view"]["text"] == "3 1 4 1 5"


def patched(page: Path, source: Path, target: Path) -> None:
    """Copy a code base to `target` and make the edits of the page's diffs, as a reader would."""
    diff = "".join(re.findall(r"(?ms)^```diff\n(.*?)^```", page.read_text(encoding="utf-8")))
    for name in re.findall(r"(?m)^--- a/(\S+)", diff):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes((source / name).read_bytes())
    subprocess.run(["git", "apply", "--unidiff-zero", "-"], input=diff, text=True, cwd=target, check=True)


def deep_copied(subject: Subject) -> None:
    """A copy, as exponential means of weights make one, computes the same and has reads of its own."""
    model = subject.random_queries()
    twin = copy.deepcopy(model)
    assert distance(subject.run(twin)[0], subject.run(model)[0]) == 0
    assert reads(twin).query is not reads(model).query


class _Pass(nn.Module):
    """A pass of a subject as a module without arguments."""

    def __init__(self, subject: Subject, model: nn.Module) -> None:
        super().__init__()
        self.subject, self.model = subject, model

    def forward(self) -> Tensor:
        return self.subject.run(self.model)[0]


class _StandIn(types.ModuleType):
    """A module whose names are all empty classes."""

    class InterpolationMode:
        NEAREST, BILINEAR, BICUBIC, BOX, HAMMING, LANCZOS = range(6)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def import_timm() -> Any:
    """Import timm. Where torchvision is missing, for no build fits torch's, its data pipeline gets empty classes.

    The stand-in goes again: other libraries ask whether there is a torchvision.
    """
    parts = ("", ".transforms", ".transforms.functional", ".datasets", ".ops", ".ops.misc")
    paths = [f"torchvision{part}" for part in parts]
    missing = importlib.util.find_spec("torchvision") is None
    for path in paths if missing else ():
        sys.modules[path] = _StandIn(path)
        sys.modules[path].__path__ = []
        parent, _, name = path.rpartition(".")
        if parent:
            setattr(sys.modules[parent], name, sys.modules[path])
    try:
        timm = pytest.importorskip("timm", reason="make integrations installs it")
        importlib.import_module("timm.optim")
        importlib.import_module("timm.utils")
        return timm
    finally:
        for path in paths if missing else ():
            del sys.modules[path]
