"""Kimi Delta Attention (KDA, arXiv 2510.26692) in plain PyTorch, on tiles of tokens that are matrix products.

For each head, with unit keys k and queries q, values v, log decays g <= 0 of each key channel and a step size beta:

    S_t = diag(exp g_t) S_{t-1};   S_t += beta_t k_t (v_t - S_t^T k_t)^T;   o_t = S_t^T q_t / sqrt(K)

Within a tile the corrections solve one triangular system; between tiles a loop hands the state S on. The decay between
two tokens of a tile is a product of two factors, each taken from the middle of the tile. They must not overflow: the
steeper the decays, the smaller the tiles, down to one token, which is the recurrence above.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from attnres.ops.precision import compute_dtype, full_precision
from attnres.ops.sharded import PLAIN

TILE = 16
"""Tokens of a tile whose decays allow it."""

LARGEST_EXPONENT = 64.0
"""Of a factor. exp(64) is 6e27: a scaled loss still multiplies it without leaving fp32, which ends at 3e38."""


def kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the outputs (B, T, H, V) in the dtype of `q`, and the last state (B, H, K, V), in fp32 or fp64.

    Tokens of one tile share the point from which its decays are taken: a later token changes an earlier one's output,
    by rounding alone.

    Args:
        q, k: (B, T, H, K), which are scaled to length 1 here. v: (B, T, H, V).
        g: log decays (B, T, H, K), at most 0. beta: (B, T, H).
        state: (B, H, K, V) after the tokens before these; None is zeros.
    """
    # A compiler would unroll the loop over tiles; shapes without numbers (meta, fake) say nothing of the decays.
    if torch.compiler.is_compiling() or type(g) not in PLAIN or g.is_meta:
        return _operator(q, k, v, g, beta, state)
    return _on_tiles(q, k, v, g, beta, state, tile_for(g))


def tile_for(g: Tensor) -> int:
    """Return the tokens of a tile for log decays: the largest power of two, up to `TILE`, whose factors cannot
    overflow. Steep decays so end at one token after the other."""
    steepest, tile = -float(g.detach().amin()), TILE
    while tile > 1 and steepest * tile / 2 > LARGEST_EXPONENT:
        tile //= 2
    return tile


def _on_tiles(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, tile: int
) -> tuple[Tensor, Tensor]:
    dtype, tokens, heads = q.dtype, *q.shape[1:3]
    pad = -tokens % tile

    def cut(x: Tensor) -> Tensor:  # (B, T, H, D) -> (B H, tiles, tile, D); padding neither decays nor writes
        return F.pad(x, (0, 0, 0, 0, 0, pad)).unflatten(1, (-1, tile)).permute(0, 3, 1, 2, 4).flatten(0, 1)

    with full_precision(q):
        q, k, v, g, beta = (x.to(compute_dtype(dtype)) for x in (q, k, v, g, beta.unsqueeze(-1)))
        q, k, v, g, beta = cut(_unit(q) * q.shape[-1] ** -0.5), cut(_unit(k)), cut(v), cut(g), cut(beta)
        since_start = g.cumsum(-2)
        middle = since_start[..., max(tile // 2 - 1, 0), None, :].detach()
        down, up = (since_start - middle).exp(), (middle - since_start).exp()
        begins, ends = since_start.exp(), (since_start[..., -1:, :] - since_start).exp()
        keys_seen = ((k * down) @ (k * up).mT).tril(-1)
        keys_read = ((q * down) @ (k * up).mT).tril()
        system = torch.eye(tile, dtype=k.dtype, device=k.device) + beta * keys_seen
        given = beta * torch.cat([v, k * begins], -1)
        solved = torch.linalg.solve_triangular(system, given, upper=False, unitriangular=True)
        fresh, old = solved.split([v.shape[-1], k.shape[-1]], -1)
        left, last = begins[..., -1, :].unsqueeze(-1), (ends * k).mT
        if state is None:
            now = q.new_zeros(len(q), k.shape[-1], v.shape[-1])
        else:
            now = state.to(q.dtype).flatten(0, 1)
        states, writes = [], []
        for fresh_n, old_n, left_n, last_n in zip(*(x.unbind(1) for x in (fresh, old, left, last)), strict=True):
            states.append(now)
            writes.append(torch.baddbmm(fresh_n, old_n, now, alpha=-1))
            now = torch.baddbmm(left_n * now, last_n, writes[-1])
        output = (q * begins) @ torch.stack(states, 1) + keys_read @ torch.stack(writes, 1)
    output = output.unflatten(0, (-1, heads)).permute(0, 2, 3, 1, 4).flatten(1, 2)  # (B, padded T, H, V)
    return output[:, :tokens].to(dtype), now.unflatten(0, (-1, heads))


def _unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()  # the eps of FLA and Transformers


@torch.library.custom_op("attnres::kda", mutates_args=())
def _operator(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    output, state = _on_tiles(q, k, v, g, beta, state, tile_for(g))
    return output.contiguous(), state.contiguous()


@_operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    state_shape = (v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    return q.new_empty(v.shape), q.new_empty(state_shape, dtype=compute_dtype(q.dtype))


@torch.library.custom_op("attnres::kda_backward", mutates_args=())
def _backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, grad: Tensor, grad_state: Tensor
) -> list[Tensor]:
    """The pass is made again: a compiler saves what goes into an operator, and nothing of its inside."""
    tile = tile_for(g)
    given = [q, k, v, g, beta] if state is None else [q, k, v, g, beta, state]

    def run(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return _on_tiles(*inputs[:5], None if state is None else inputs[5], tile)

    return [gradient.contiguous() for gradient in torch.func.vjp(run, *given)[1]((grad, grad_state))]


@_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, grad: Tensor, grad_state: Tensor
) -> list[Tensor]:
    given = [q, k, v, g, beta] if state is None else [q, k, v, g, beta, state]
    return [x.new_empty(x.shape) for x in given]


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx, grad: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _backward(*ctx.saved_tensors, grad, grad_state)
    return (*gradients, None)[:6]


_operator.register_autograd(_gradients, setup_context=_setup)
