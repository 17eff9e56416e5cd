"""KDA on tiles against the recurrence as it is written, and against Transformers' function."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.kimi_linear import modeling_kimi_linear

from attnres.ops.kda import LARGEST_EXPONENT, TILE, kda, tile_for

LOWEST = -8.0  # a log decay that whole tiles allow


def recurrence(q, k, v, g, beta, state=None):
    """Each token's output and the state after it."""
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    s = q.new_zeros(q.shape[0], q.shape[2], k.shape[3], v.shape[3]) if state is None else state
    for t in range(q.shape[1]):
        s = s * g[:, t].exp().unsqueeze(-1)
        wrong = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], s)
        s = s + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t].unsqueeze(-1) * wrong)
        yield torch.einsum("bhk,bhkv->bhv", q[:, t], s) / math.sqrt(q.shape[-1]), s


def by_token(*given):
    outputs, states = zip(*recurrence(*given), strict=True)
    return torch.stack(outputs, 1), states[-1]


def inputs(tokens, *, lowest=LOWEST, dtype=torch.float64, sizes=(2, 3, 8, 6)):
    """Random q, k, v, g, beta and state; one log decay is the lowest."""
    batch, heads, key, value = sizes
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    g = lowest * torch.sigmoid(2 * draw(batch, tokens, heads, key))
    g[0, 0, 0, 0] = lowest
    vectors = [draw(batch, tokens, heads, size) for size in (key, key, value)]
    drawn = [*vectors, g, draw(batch, tokens, heads).sigmoid(), draw(batch, heads, key, value)]
    return [x.requires_grad_() for x in drawn]


def gradients(function, given, scale=1.0):
    output, state = function(*given)
    wave = torch.arange(output.numel(), dtype=output.dtype).view(output.shape).sin()
    return torch.autograd.grad(scale * ((output * wave).sum() + state.square().sum()), given)


def relative(ours, expected):
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, expected, strict=True))


@torch.no_grad()
def test_outputs_and_states_are_those_of_the_recurrence_at_every_length():
    *given, state = inputs(65)
    for used in (None, state):
        outputs, states = zip(*recurrence(*given, used), strict=True)
        for tokens in range(1, 66):
            expected = torch.stack(outputs[:tokens], 1), states[tokens - 1]
            assert relative(kda(*(x[:, :tokens] for x in given), used), expected) < 1e-12, tokens


@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 65])
def test_gradients_are_those_of_the_recurrence(tokens):
    given = inputs(tokens)
    assert relative(gradients(kda, given), gradients(by_token, given)) < 1e-10


@pytest.mark.parametrize("lowest, tile", [(-1e-3, 16), (-8, 16), (-10, 8), (-30, 4), (-64, 2), (-65, 1), (-400, 1)])
def test_steep_decays_make_tiles_smaller(lowest, tile):
    given = inputs(40, lowest=lowest)
    assert tile_for(given[3]) == tile
    assert relative(kda(*given), by_token(*given)) < 1e-12
    assert relative(gradients(kda, given), gradients(by_token, given)) < 1e-10


def test_the_steepest_whole_tile_stays_in_fp32_with_a_scaled_loss():
    given = inputs(64, dtype=torch.float32, lowest=-2 * LARGEST_EXPONENT / TILE)
    with torch.no_grad():
        given[3].fill_(-2 * LARGEST_EXPONENT / TILE)
    scaled = [grad / 2**24 for grad in gradients(kda, given, 2.0**24)]
    assert relative(scaled, gradients(by_token, given)) < 5e-3


@torch.no_grad()
def test_a_state_goes_on_where_the_tokens_before_it_ended():
    *given, state = inputs(50)
    whole, last = kda(*given, state)
    for cut in (1, 16, 23):
        first, state_of_first = kda(*(x[:, :cut] for x in given), state)
        rest, end = kda(*(x[:, cut:] for x in given), state_of_first)
        assert relative([torch.cat([first, rest], 1), end], [whole, last]) < 1e-12


@torch.no_grad()
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
def test_transformers_function_gives_the_same(dtype, bound):
    *given, state = inputs(100, dtype=torch.float32)
    given = [*(x.to(dtype) for x in given[:3]), given[3], given[4].to(dtype)]
    q, k, v, g, beta = given
    theirs = modeling_kimi_linear.chunk_kimi_delta_attention(
        q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    ours = kda(*given, state)
    assert [x.dtype for x in ours] == [x.dtype for x in theirs] == [dtype, torch.float32]
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max().item() < bound


def test_autocast_changes_nothing():
    given = inputs(20, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = kda(*given)
    assert all(torch.equal(a, b) for a, b in zip(inside, kda(*given), strict=True))


class Written(TorchDispatchMode):
    """Counts the numbers that operations write, views left out."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.total += result.numel()
        return result


def test_a_fraction_of_the_numbers_is_written():
    given = inputs(256, dtype=torch.float32, sizes=(1, 2, 16, 16))
    q, k, v, g, beta, _ = given
    counts = []
    for call in (
        lambda: modeling_kimi_linear.chunk_kimi_delta_attention(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True),
        lambda: kda(q, k, v, g, beta),
    ):
        with Written() as written:
            torch.autograd.grad(call()[0].square().sum(), given[:5])
        counts.append(written.total)
    assert counts[1] < 0.1 * counts[0], counts


@pytest.mark.quick("-1.0")
@pytest.mark.parametrize("lowest", [-1.0, -30.0])
def test_a_compiler_sees_one_operator(lowest):
    given = inputs(37, lowest=lowest, dtype=torch.float32)
    for used in (given, [*given[:5], None]):
        torch.library.opcheck(torch.ops.attnres.kda.default, tuple(used), test_utils=("test_schema", "test_faketensor"))
    graphs = []

    def note(graph, _):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    torch._dynamo.reset()
    torch.compile(kda, fullgraph=True, backend=note)(*given)
    assert len(graphs) == 1 and len(graphs[0]) < 5, graphs
    torch._dynamo.reset()
    compiled = torch.compile(kda, fullgraph=True, backend="aot_eager")
    assert relative(gradients(compiled, given), gradients(kda, given)) < 1e-5
    torch._dynamo.reset()
