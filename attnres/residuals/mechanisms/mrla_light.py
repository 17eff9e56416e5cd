"""MRLA-light: each layer's end is gated by its own query and key, and takes part of the state before the layer."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnres.errors import UserError
from attnres.ops import compute_dtype, full_precision
from attnres.residuals.base import Residual
from attnres.residuals.layout import About, Traits
from attnres.residuals.settings import positive, whole
from attnres.residuals.watch import NormLike


class Recurrent(NamedTuple):
    """The running stream, and the stream at the start of the layer in progress; both (..., d)."""

    stream: Tensor
    before: Tensor


class MRLALight(Residual):
    """After layer t (two sublayers), whose plain end is y and whose input was o_{t-1}:

        o_t = y + s * V + lambda * N'(o_{t-1}),   x = N(y),  s = sigmoid(Q . K / sqrt(c)) for each head of c channels
        Q, K = conv(x), with kernels along the channels,   V = gelu(u * x)

    The publication is about image networks; this is a translation to a token's vector. There Q and K are convolutions
    along the channels of the mean over an image; here they are those convolutions of the token itself. There V is a 3 x
    3 convolution of each channel over the image; here it is one number u a channel. LayerNorms become RMSNorms. The
    layout follows the vision transformer of the authors' code, whose o_{t-1} is the layer's input.

    A layer has `conv` (2, k), k about (log2 d + 1) / 2 and odd; `value` u, `decay` lambda (d,); gains of N and N'
    (2, d). Start, at random as there: conv uniform within 1/sqrt(k), u within 1, lambda normal(1); gains 1.

    Args:
        head_width: c; by default 16, or its greatest common divisor with the width.

    Source: Fang et al., "Cross-Layer Retrospective Retrieving via Layer Attention", arXiv 2302.03985;
    github.com/joyfang1106/MRLA.
    """

    name = "mrla_light"
    whole_layers = True
    traits = Traits(False, sums_to_one=False, has_query=False, starts_standard=False, linear=False)
    about = About(
        "after each layer o_t = y + sigmoid(Q . K / sqrt(c)) V + lambda N(o_{t-1}); Q, K, V of N(y)",
        "lambda normal(1), Q, K, V uniform",
        "5",
        "Fang et al., arXiv 2302.03985",
    )

    def __init__(self, num_sublayers: int, width: int, *, head_width: int | None = None, eps: float = 1e-6) -> None:
        super().__init__(num_sublayers, width)
        head_width = math.gcd(16, width) if head_width is None else whole("head_width", head_width)
        if width % head_width:
            raise UserError(f"head_width is {head_width}: expected a number that divides the width {width}")
        self.head_width, self.eps = head_width, positive("eps", eps)
        layers, half = num_sublayers // 2, int((math.log2(width) + 1) / 2)
        self.gain = nn.Parameter(torch.empty(layers, 2, width))
        self.conv = nn.Parameter(torch.empty(layers, 2, half + 1 - half % 2))
        self.value = nn.Parameter(torch.empty(layers, width))
        self.decay = nn.Parameter(torch.empty(layers, width))
        self.init_parameters()

    def init_parameters(self) -> None:
        bound = self.conv.shape[-1] ** -0.5
        nn.init.ones_(self.gain)
        nn.init.uniform_(self.conv, -bound, bound)
        nn.init.uniform_(self.value, -1.0, 1.0)
        nn.init.normal_(self.decay)

    def start(self, embedding: Tensor) -> Recurrent:
        return Recurrent(embedding, embedding)

    def read(self, state: Recurrent, index: int, norm: NormLike) -> tuple[Tensor, Recurrent]:
        return self.normed(state.stream, index, norm), state

    def write(self, state: Recurrent, index: int, output: Tensor) -> Recurrent:
        stream = state.stream + output
        if index % 2 == 0:
            return Recurrent(stream, state.before)
        stream = self._retrieved(stream, state.before, index // 2)
        return Recurrent(stream, stream)

    def _retrieved(self, stream: Tensor, before: Tensor, layer: int) -> Tensor:
        dtype = compute_dtype(stream.dtype)
        with full_precision(stream):
            gain, conv = self.gain[layer].to(dtype), self.conv[layer].to(dtype)
            x = F.rms_norm(stream.to(dtype), (self.width,), gain[0], self.eps)
            pairs = F.conv1d(x.reshape(-1, 1, self.width), conv.unsqueeze(1), padding=conv.shape[-1] // 2)
            query, key = pairs.unflatten(-1, (-1, self.head_width)).unbind(1)
            share = ((query * key).sum(-1, keepdim=True) * self.head_width**-0.5).sigmoid()
            value = F.gelu(self.value[layer].to(dtype) * x)
            gated = (share * value.view(*query.shape)).view_as(x)
            kept = self.decay[layer].to(dtype) * F.rms_norm(before.to(dtype), (self.width,), gain[1], self.eps)
            return (stream + gated + kept).to(stream.dtype)

    def hidden_state(self, state: Recurrent) -> Tensor:
        return state.stream

    def finish(self, state: Recurrent, norm: NormLike) -> Tensor:
        return self.normed(state.stream, self.num_sublayers, norm)
