"""Losses made from few rows of logits at a time are those of all logits, and so are their gradients."""

import pytest
import torch
from tiny import SIZE
from torch.nn import functional as F

from attnres import head, loss_kernel
from attnres.head import (
    POSITIONS,
    Head,
    Soft,
    body_of,
    evaluating,
    head_of,
    is_apart,
    log_probs,
    losses_in_parts,
    next_token_losses,
    sums_in_parts,
    token_losses,
)
from attnres.models import build, build_plain


def test_every_module_is_in_the_mode_it_was_in_afterwards():
    """A frozen part that was put into evaluation mode stays in it, its dropout off."""
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Linear(2, 2)))
    model.train()
    model[1].eval()
    with pytest.raises(KeyError), evaluating(model):
        assert not any(module.training for module in model.modules())
        raise KeyError
    assert [module.training for module in model.modules()] == [True, True, False, False, False]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_losses_made_in_parts_are_the_cross_entropy(dtype):
    logits = torch.randn(3, POSITIONS, 7).to(dtype)
    targets = torch.randint(7, (3, POSITIONS))
    wide = logits.double() if dtype is torch.float64 else logits.float()
    expected = F.cross_entropy(wide.transpose(1, 2), targets, reduction="none")
    losses = token_losses(logits, targets)
    assert losses.dtype == expected.dtype
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(-log_probs(logits).gather(-1, targets[..., None])[..., 0], expected)
    assert torch.equal(token_losses(logits.requires_grad_(), targets), losses)


def test_losses_of_the_next_token():
    model, ids = build(SIZE, "block", vocab_size=30, max_positions=16).eval(), torch.randint(30, (2, 9))
    with torch.no_grad():
        losses = next_token_losses(model, ids)
        assert losses.mean().item() == pytest.approx(model(input_ids=ids, labels=ids).loss.item(), rel=1e-5)
        assert next_token_losses(model, ids[:, :1]).shape == (2, 0)


V, D, B, T = 37, 12, 3, 7
HEADS = {"plain": {}, "bias": {"bias": True}, "Granite's": {"bias": True, "scale": 3.0}, "Gemma's": {"cap": 2.0}}


def drawn(kind, dtype=torch.float64):
    """A head, hidden states and targets."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    options = {**HEADS[kind]}
    bias = randn(V) if options.pop("bias", False) else None
    return Head(randn(V, D), bias, **options), randn(B, T, D), torch.randint(V, (B, T), generator=generator)


def whole(one, hidden, targets, soft=None):
    """Torch's own losses of all logits: the objective, the cross-entropy, and the divergence."""
    z = (hidden @ one.weight.T + (0 if one.bias is None else one.bias)) / one.scale
    z = z if one.cap is None else one.cap * torch.tanh(z / one.cap)
    entropy = F.cross_entropy(z.flatten(0, 1), targets.flatten(), reduction="sum")
    if soft is None:
        return entropy, entropy, torch.zeros_like(entropy)
    t = soft.temperature
    theirs = soft.head.after(soft.hidden @ soft.head.weight.T)
    divergence = t**2 * F.kl_div((z / t).log_softmax(-1), (theirs / t).softmax(-1), reduction="sum")
    return (1 - soft.weight) * entropy + soft.weight * divergence, entropy, divergence


def gradients(one, hidden, objective):
    """Of 0.3 times the objective, at all that it is made of."""
    leaves = [leaf for leaf in (hidden, one.weight, one.bias) if leaf is not None]
    return torch.autograd.grad(0.3 * objective, leaves)


@pytest.fixture
def fused(monkeypatch):
    """Losses are made by the kernel, in Triton's interpreter, in several blocks a row."""
    pytest.importorskip("triton")
    monkeypatch.setattr(head, "_is_fused", lambda x: True)
    monkeypatch.setattr(loss_kernel, "BLOCK", 16)


@pytest.mark.quick("plain-*", "Gemma's-4")
@pytest.mark.parametrize("rows", [4, 100])
@pytest.mark.parametrize("kind", HEADS)
def test_one_kernel_makes_losses_and_gradients_of_rows_of_logits(kind, rows, monkeypatch, fused):
    monkeypatch.setattr(head, "PART", rows * V)
    one, hidden, targets = drawn(kind, torch.float32)
    ours, expected = sums_in_parts(one, hidden, targets), whole(one, hidden, targets)
    torch.testing.assert_close(tuple(ours), expected, rtol=1e-6, atol=1e-5)
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(gradients(one, hidden, ours.objective), gradients(one, hidden, expected[0]), **close)


@pytest.mark.parametrize("kind", HEADS)
def test_the_kernel_of_bf16_logits_is_plain_torch_to_a_rounding(kind, fused):
    """Far logits too, of which exp would overflow. The interpreter cuts to bf16 where a GPU rounds."""
    one, hidden, targets = drawn(kind, torch.bfloat16)
    x, y = hidden.detach().flatten(0, 1) * torch.tensor([1.0, 400.0] * 11)[: B * T, None].bfloat16(), targets.flatten()
    grad, sums = head._part(one, x, y, None, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "_is_fused", lambda x: False)
        expected, exact = head._part(one, x, y, None, None)
    assert grad.dtype == torch.bfloat16 and grad.isfinite().all()
    torch.testing.assert_close(sums, exact, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(grad, expected.bfloat16(), rtol=2**-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy's, in the interpreter
def test_a_loss_that_is_not_finite_is_no_finite_one_of_the_kernel(fused):
    z = torch.tensor([[1.0, float("nan"), 0.0], [float("inf"), 0.0, 0.0], [2.0, 1.0, 0.0]])
    losses = loss_kernel.losses_and_gradients(z, torch.tensor([0, 1, 0]))
    assert losses.isfinite().tolist() == [False, False, True]


@pytest.mark.parametrize("rows", [1, 4, 100])
@pytest.mark.parametrize("taught", [False, True], ids=["alone", "taught"])
@pytest.mark.parametrize("kind", HEADS)
def test_parts_are_the_whole(kind, taught, rows, monkeypatch):
    monkeypatch.setattr(head, "PART", rows * V)
    one, hidden, targets = drawn(kind)
    soft = None
    if taught:
        teacher, theirs, _ = drawn("Gemma's")
        soft = Soft(Head(teacher.weight.detach() + 0.1, cap=2.0), theirs.detach() * 2, 0.7, 1.7)
    ours, expected = sums_in_parts(one, hidden, targets, soft), whole(one, hidden, targets, soft)
    torch.testing.assert_close(tuple(ours), expected)
    assert not ours.cross_entropy.requires_grad and not ours.divergence.requires_grad
    torch.testing.assert_close(gradients(one, hidden, ours.objective), gradients(one, hidden, expected[0]))
    losses = losses_in_parts(one, hidden, targets)
    assert losses.shape == targets.shape and not losses.requires_grad
    torch.testing.assert_close(losses.sum(), expected[1])


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_rounding_is_that_of_the_precision(dtype, bound, monkeypatch):
    """In fp32, and by autocast in bf16: no further from fp64 than torch's own losses are."""
    monkeypatch.setattr(head, "PART", 5 * V)
    exact, hidden, targets = drawn("bias")
    expected = gradients(exact, hidden, whole(exact, hidden, targets)[0])
    one, hidden, targets = drawn("bias", torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        ours = sums_in_parts(one, hidden, targets).objective
        logits = one.logits(hidden)
    theirs = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    assert ours.dtype == torch.float32 and ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    for a, b, c in zip(gradients(one, hidden, ours), gradients(one, hidden, theirs), expected, strict=True):
        scale = c.abs().max()
        error, eager = ((x.double() - c).abs().max() / scale for x in (a, b))
        assert a.dtype == torch.float32 and error < bound and error <= 1.5 * eager + 1e-7


def test_no_tensor_is_larger_than_a_part(monkeypatch):
    """Counted in every operation, forward and backward; nothing of the size of a part is kept in between."""
    from torch.utils._python_dispatch import TorchDispatchMode

    monkeypatch.setattr(head, "PART", 4 * V)

    class Sizes(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes = [
                x.numel() for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, torch.Tensor)
            ]
            Sizes.largest = max(Sizes.largest, *sizes, 0)
            return out

    one, hidden, targets = drawn("plain")
    kept = []
    with Sizes(), torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        gradients(one, hidden, sums_in_parts(one, hidden, targets).objective)
    assert B * T * V > 600 and Sizes.largest == V * D and max(kept, default=0) < 4 * V


def test_frozen_weights_cost_no_gradient():
    one, hidden, targets = drawn("bias")
    frozen = Head(one.weight.detach(), one.bias.detach())
    sums_in_parts(frozen, hidden, targets).objective.backward()
    assert hidden.grad is not None
    with pytest.raises(RuntimeError, match="do one backward pass"):
        loss = sums_in_parts(one, hidden, targets).objective
        loss.backward(retain_graph=True)
        loss.backward()


def test_a_models_head_is_told_from_what_its_logits_are():
    model = build_plain(SIZE, vocab_size=V, max_positions=16)
    assert is_apart(model) and is_apart(build(SIZE, "full", vocab_size=V, max_positions=16).bfloat16())
    ids = torch.arange(8)[None]
    hidden = body_of(model)(input_ids=ids).last_hidden_state
    torch.testing.assert_close(head_of(model).logits(hidden), model(input_ids=ids).logits)
    forward = type(model).forward

    class Bounded(type(model)):
        """Does with its logits what no field of its config says."""

        def forward(self, **inputs):
            output = forward(self, **inputs)
            output.logits = 30 * torch.tanh(output.logits / 30)
            return output

    model.__class__ = Bounded
    assert not is_apart(model)
    model.lm_head = torch.nn.Sequential(model.lm_head)
    assert head_of(model) is None and not is_apart(model)
