"""Checks of forward and backward passes: shapes, dtypes, gradients, and states."""

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

from attnres.errors import first_line
from attnres.residuals.base import Residual
from attnres.residuals.check.subject import (
    WIDTH,
    Change,
    Failed,
    Network,
    Subject,
    agree,
    close,
    collecting,
    expect,
    tokens,
)
from attnres.residuals.state import State

_WHOLE = (torch.float32, torch.float64)
_STEP = 1e-6
"""Step of the finite differences."""


def shapes(subject: Subject) -> str:
    """Check that batches of any rank work, that no token affects another, and that a norm works as a value and as a
    function."""
    largest = 0.0
    for residual, network in subject.networks():
        batch = tokens(2, 2, 3)
        whole = network.run(residual, batch)
        for rank in range(4):
            part = batch[(0,) * (3 - rank)]
            states: list[State] = []
            result = network.run(residual, part, collecting(states))
            at = f"tokens of shape {tuple(part.shape[:-1])} through {network.depth} sublayers give"
            largest = max(largest, close(result, whole[(0,) * (3 - rank)], f"{at} another result"))
            for state in states:
                shown = residual("hidden_state", state)
                expect(shown.shape == part.shape, f"{at} a hidden_state {tuple(shown.shape)}")
        fused = Network(network.depth, fused=True).run(residual, batch)
        largest = max(largest, close(fused, whole, "norms as values change the result"))
    return f"(d,) to (A, B, T, d), {', '.join(map(str, subject.depths))} sublayers, {largest:.1e}"


def dtypes(subject: Subject) -> str:
    """Check that every read and the output have the embedding's dtype, and that parameters are fp32."""
    far: dict[torch.dtype, float] = {}
    for depth in subject.depths:
        residual = subject.residual(depth, dtype=torch.float32)
        exact = Network(depth, fused=True).run(residual, tokens(2, 3))
        for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 0.3)):
            for fused in (True, False):
                network, embedding = Network(depth, dtype, fused=fused), tokens(2, 3, dtype=dtype)
                result = network.run(residual, embedding)
                name = str(dtype).removeprefix("torch.")
                expect(result.dtype is dtype, f"a {name} embedding gives a {result.dtype} output")
                state = residual("start", embedding)
                for index in range(depth):
                    x, state = residual("read", state, index, network.norm(index))
                    for vector in _pytree.tree_leaves(x):
                        expect(vector.dtype is dtype, f"a {name} embedding gives a {vector.dtype} read {index}")
                    state = residual("write", state, index, network.sublayer(index, x))
                shown = residual("hidden_state", state)
                expect(shown.dtype is dtype, f"a {name} embedding gives a {shown.dtype} hidden_state")
                far[dtype] = max(far.get(dtype, 0.0), close(result, exact, f"{name} differs from fp64", bound))
        grads = (Network(depth, dtype, fused=True).gradients(residual, tokens(2, 3, dtype=dtype)) for dtype in _WHOLE)
        far[torch.float32] = max(far[torch.float32], agree(*grads, "fp32", 1e-3))
    return ", ".join(f"{str(dtype).removeprefix('torch.')} {value:.1e}" for dtype, value in far.items())


def gradients(subject: Subject) -> str:
    """Check that the gradients of the embedding and every parameter equal finite differences in fp64, and are not all
    zero."""
    largest = 0.0
    for residual, network in subject.networks():
        embedding = tokens(2)
        upstream = tokens(2, seed=3)
        names = ["the embedding", *(name for name, p in residual.named_parameters() if p.requires_grad)]
        leaves = [embedding, *(p.data for p in residual.parameters() if p.requires_grad)]
        _, grads = network.gradients(residual, embedding)
        scale = max(1.0, *(grad.abs().max().item() for grad in grads if grad.numel()))
        for place, (name, leaf, grad) in enumerate(zip(names, leaves, grads, strict=True)):
            if network.depth == subject.depth:
                expect(bool(grad.any()), f"{name} has no gradient: nothing depends on it")
            draw = torch.Generator().manual_seed(place)
            for _ in range(3):
                direction = torch.randn(leaf.shape, generator=draw, dtype=torch.float64)
                # bounded in length, because the error grows with its cube
                direction *= (WIDTH / max(WIDTH, leaf.numel())) ** 0.5
                start, values = leaf.clone(), []
                for sign in (1.0, -1.0):
                    with torch.no_grad():
                        leaf.copy_(start + sign * _STEP * direction)
                        values.append((network.run(residual, embedding) * upstream).sum().item())
                        leaf.copy_(start)
                slope = (values[0] - values[1]) / (2 * _STEP)
                far = abs(slope - (grad * direction).sum().item()) / scale
                largest = max(largest, far)
                expect(far <= 1e-6, f"the gradient of {name} is not that of finite differences: {far:.1e}")
    return f"finite differences {largest:.1e}"


def progress(subject: Subject) -> str:
    """Check that at any training progress results and gradients are finite, and the penalty is None or a finite scalar
    with finite gradients."""
    largest = None
    for residual, network in subject.networks():
        for fraction in (0.0, 0.5, 1.0):
            residual("set_progress", fraction)
            at = f"at {fraction:.0%} of training"
            result, grads = network.gradients(residual, tokens(2, 3))
            expect(all(bool(part.isfinite().all()) for part in (result, *grads)), f"{at} a result is not finite")
            penalty = residual("penalty")
            if penalty is None:
                continue
            expect(penalty.dim() == 0 and bool(penalty.isfinite()), f"{at} the penalty is {penalty}, no finite scalar")
            leaves = [p for p in residual.parameters() if p.requires_grad]
            grads = torch.autograd.grad(penalty, leaves, allow_unused=True, materialize_grads=True)
            expect(all(bool(grad.isfinite().all()) for grad in grads), f"{at} a gradient of the penalty is not finite")
            largest = max(largest or 0.0, penalty.item())
    return "no penalty" if largest is None else f"a penalty of up to {largest:.2g}"


def states(subject: Subject) -> str:
    """Check that a state is a tree of tensors that nothing changes in place, and that a pass has no other memory, so
    that passes may be interleaved."""
    for residual, network in subject.networks():
        second_embedding = tokens(2, 3, seed=5)
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                expected = network.run(residual, tokens(2, 3))
                _unchanged(residual, network, tokens(2, 3))
                disturbed = network.run(residual, tokens(2, 3), _disturbed(residual, network, second_embedding))
            close(disturbed, expected, "another pass in the middle of one changes it")
    return "no tensor changed in place, passes do not touch one another"


def _disturbed(residual: Residual, network: Network, embedding: Tensor) -> Change:
    """Return a function that runs another pass before each sublayer of one."""

    def change(index: int, state: State) -> State:
        network.run(residual, embedding)
        return state

    return change


def _unchanged(residual: Residual, network: Network, embedding: Tensor) -> None:
    """Run a network; raise `Failed` if a method changes the tensors of the state it was given."""

    def keep(verb: str, *values: Any) -> Any:
        leaves = _pytree.tree_leaves(values)
        strange = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor)]
        expect(not strange, f"the state before {verb} holds a {''.join(strange[:1])}: expected tensors in tuples")
        return verb, [(leaf, leaf._version, leaf.detach().clone()) for leaf in leaves]

    def compare(before: Any) -> None:
        verb, kept = before
        for leaf, version, copy in kept:
            changed = leaf._version != version or not torch.equal(leaf, copy)
            expect(not changed, f"{verb} changes a tensor in place that is not its own")

    before = keep("start", embedding)
    state = residual("start", embedding)
    compare(before)
    for index in range(network.depth):
        before = keep("read", state)
        x, state = residual("read", state, index, network.norm(index))
        compare(before)
        output = network.sublayer(index, x)
        before = keep("write", state, output)
        state = residual("write", state, index, output)
        compare(before)
    before = keep("finish", state)
    residual("finish", state, network.norm(network.depth))
    compare(before)


def cuts(subject: Subject) -> str:
    """Check that a pass cut before any sublayer, with its state packed as `slots` says and unpacked, continues with the
    same result and gradients."""
    largest, most = 0.0, 0
    for residual, network in subject.networks():
        embedding = tokens(2, 3)
        expected = network.gradients(residual, embedding)
        kept: dict[str, Tensor] = {}
        for index in range(network.depth + 1):
            change, at = _cut(residual, index, kept), f"a cut before sublayer {index} of {network.depth}"
            largest = max(largest, agree(network.gradients(residual, embedding, change=change), expected, at))
            with torch.no_grad():
                result = network.run(residual, embedding, change)
            close(result, expected[0], f"{at}, without gradients, changes the result")
            most = max(most, len(residual.slots(index)))
    return f"at most {most} tensors cross, {largest:.1e}"


def _cut(residual: Residual, cut: int, kept: dict[str, Tensor]) -> Change:
    """Return a function that packs and unpacks the state before sublayer `cut`, and compares it with its slots.

    Args:
        kept: tensors of permanent slots at earlier cuts, by name; this cut's are added.
    """

    def change(index: int, state: State) -> State:
        if index != cut:
            return state
        packed, slots = residual.pack(state, index), residual.slots(index)
        at = f"before sublayer {index} of {residual.num_sublayers}"
        shapes = [tuple(tensor.shape) for tensor in packed]
        described = [(2, 3, *slot.axes, WIDTH) for slot in slots]
        expect(shapes == described, f"{at} pack gives {shapes}, slots say {described}")
        expect(len({slot.name for slot in slots}) == len(slots), f"{at} two slots have one name")
        for slot, tensor in zip(slots, packed):
            if slot.kept:
                close(tensor, kept.setdefault(slot.name, tensor), f"kept slot '{slot.name}' is another tensor {at}")
        return residual.unpack(packed, index)

    return change


def checkpointing(subject: Subject) -> str:
    """Check that non-reentrant activation checkpointing of every sublayer gives the same gradients."""
    largest = 0.0
    for residual, network in subject.networks():
        expected = network.gradients(residual, tokens(2, 3))
        result = network.gradients(residual, tokens(2, 3), around=partial(checkpoint, use_reentrant=False))
        largest = max(largest, agree(result, expected, "activation checkpointing"))
    return f"{largest:.1e}"


def compiled(subject: Subject) -> str:
    """Check that torch.compile(fullgraph=True) compiles a whole network, forward and backward, and changes no
    result."""
    depth = next((depth for depth in subject.depths if depth > 2), subject.depth)
    residual, network = subject.residual(depth), Network(depth, fused=True)
    expected = network.gradients(residual, tokens(2, 3))
    network.run = torch.compile(network.run, fullgraph=True, backend="aot_eager")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of the compiler itself
            result = network.gradients(residual, tokens(2, 3))
    except TorchDynamoException as error:
        raise Failed(f"the compiler breaks the graph: {first_line(error)}") from error
    finally:
        torch._dynamo.reset()
    return f"one graph, {agree(result, expected, 'torch.compile'):.1e}"
