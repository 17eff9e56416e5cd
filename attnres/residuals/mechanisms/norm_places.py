"""Rules of one stream that differ in the place of a norm: post-norm, HybridNorm, KEEL, Peri-LN, LayerNorm scaling."""

import torch
from torch import Tensor, nn

from attnres.ops import Norm, apply_norm
from attnres.residuals.layout import About, Traits
from attnres.residuals.mechanisms.standard import OneStream, Standard
from attnres.residuals.settings import positive, whole
from attnres.residuals.watch import NormLike


class PostNorm(OneStream):
    """x_{l+1} = N(x_l + f_l(x_l)).

    A pre-norm decoder has one norm in front of each sublayer and one at the end: here they serve as the embedding's
    norm and as each sublayer's post-norm, so no parameter is added or left out.

    State: the input of the next norm, then (after the read) its output, which is the new stream; (..., d).

    Source: Vaswani et al., "Attention Is All You Need", arXiv 1706.03762.
    """

    name = "postnorm"
    traits = Traits(False, sums_to_one=False, has_query=False, starts_standard=False, linear=False)
    about = About("N(x + f(x))", "nothing", "3", "Vaswani et al., arXiv 1706.03762")

    def shortcut(self) -> float:
        """Return the factor of the stream in each sum."""
        return 1.0

    def read(self, state: Tensor, index: int, norm: NormLike) -> tuple[Tensor, Tensor]:
        if isinstance(norm, Norm):
            x = self.normed(state, index, norm._replace(out_dtype=state.dtype))
            return x if norm.out_dtype is None else x.to(norm.out_dtype), x
        x = self.normed(state, index, norm)
        return x, x

    def write(self, state: Tensor, index: int, output: Tensor) -> Tensor:
        return torch.add(output, state, alpha=self.shortcut())


class DeepNorm(PostNorm):
    """x_{l+1} = norm(a x_l + f_l(x_l)), a = (2M)^(1/4) for M layers; value, output and MLP weights start / (8M)^(1/4).

    Norms and state are those of PostNorm.

    Source: Wang et al., "DeepNet: Scaling Transformers to 1,000 Layers", arXiv 2203.00555, decoder-only column.
    """

    name = "deepnorm"
    traits = PostNorm.traits._replace(scales_branches=True, colour="#e69f00")
    even_start = True
    about = About(
        "N(a x + f(x)), a = (2M)^(1/4)",
        "value, output and MLP weights / (8M)^(1/4)",
        "3",
        "Wang et al., arXiv 2203.00555",
    )

    def branch_scale(self) -> float:
        return (4 * self.num_sublayers) ** -0.25

    def shortcut(self) -> float:
        return self.num_sublayers**0.25


class HybridNorm(PostNorm):
    """y = x + attention(N x), x = N(y) + mlp(N(y)): the norm between a layer's sublayers is a post-norm.

    The publication's attention has no norm in front of it: it norms queries, keys and values instead. A residual cannot
    do that inside an attention, so the decoder's pre-norm replaces it (a family with norms of queries and keys, such as
    qwen3, has those in addition).

    Args:
        prenorm_layers: this many first layers are x + f(N x) throughout; 1 is the publication's HybridNorm*.

    Costs no parameters.

    Source: Zhuo et al., "HybridNorm", arXiv 2503.04598.
    """

    name = "hybrid_norm"
    about = About(
        "y = x + f(N x), then N(y) + f(N(y))", "nothing", "3", "the residual of Zhuo et al., arXiv 2503.04598"
    )

    def __init__(self, num_sublayers: int, width: int, *, prenorm_layers: int = 0) -> None:
        super().__init__(num_sublayers, width)
        self.prenorm_layers = whole("prenorm_layers", prenorm_layers, least=0)

    def read(self, state: Tensor, index: int, norm: NormLike) -> tuple[Tensor, Tensor]:
        layer, place = divmod(index, len(self.sublayers))
        if layer < self.prenorm_layers or self.sublayers[place] != "mlp":
            return OneStream.read(self, state, index, norm)
        return super().read(state, index, norm)


class Keel(OneStream):
    """x_{l+1} = P_l(a x_l + f_l(N x_l)), a = L, the number of sublayers; x + f(N x) in the first layer.

    P_l is an RMSNorm with `eps` and a gain that starts at 1. It is a parameter of the residual, in addition to the
    decoder's norms N, of which the last follows the last P.

    State: the input of the next P, then (after the read) its output, which is the new stream; (..., d).

    Args:
        alpha: a in place of L; the authors choose it freely, above 1, in networks that are not deep.

    Costs d parameters a sublayer.

    Source: Chen and Wei, "Post-LayerNorm Is Back", arXiv 2601.19895, equation 8 and section 3.1.
    """

    name = "keel"
    traits = Traits(False, sums_to_one=False, has_query=False, starts_standard=False, linear=False)
    about = About("P(L x + f(N x)), L sublayers, P a norm", "gains 1", "3", "Chen and Wei, arXiv 2601.19895")

    def __init__(self, num_sublayers: int, width: int, *, alpha: float | None = None, eps: float = 1e-6) -> None:
        super().__init__(num_sublayers, width)
        self.alpha = float(num_sublayers) if alpha is None else positive("alpha", alpha)
        self.eps = positive("eps", eps)
        self.first = len(self.sublayers)
        self.gain = nn.Parameter(torch.empty(max(0, num_sublayers - self.first), width))
        self.init_parameters()

    def init_parameters(self) -> None:
        nn.init.ones_(self.gain)

    def stream(self, state: Tensor, index: int) -> Tensor:
        """Return x before sublayer `index` (L: the head)."""
        if index <= self.first:
            return state
        return apply_norm(state, Norm(self.gain[index - 1 - self.first], eps=self.eps))

    def read(self, state: Tensor, index: int, norm: NormLike) -> tuple[Tensor, Tensor]:
        return super().read(self.stream(state, index), index, norm)

    def write(self, state: Tensor, index: int, output: Tensor) -> Tensor:
        return torch.add(output, state, alpha=self.alpha if index >= self.first else 1.0)

    def finish(self, state: Tensor, norm: NormLike) -> Tensor:
        return super().finish(self.stream(state, self.num_sublayers), norm)


class PeriLN(OneStream):
    """x_{l+1} = x_l + P_l(f_l(N x_l)): each output is normed before it is added.

    P_l is an RMSNorm with `eps` and a gain that starts at 1, a parameter of the residual. The publication's norm of the
    embedding, which it calls optional, is not here.

    A gain is one number a channel: reads are no sums of outputs with one number each.

    Costs d parameters a sublayer.

    Source: Kim et al., "Peri-LN", arXiv 2502.02732.
    """

    name = "peri_ln"
    traits = Traits(False, sums_to_one=False, has_query=False, starts_standard=False, linear=False)
    about = About("x + P(f(N x)), P a norm", "gains 1", "3", "Kim et al., arXiv 2502.02732")

    def __init__(self, num_sublayers: int, width: int, *, eps: float = 1e-6) -> None:
        super().__init__(num_sublayers, width)
        self.eps = positive("eps", eps)
        self.gain = nn.Parameter(torch.empty(num_sublayers, width))
        self.init_parameters()

    def init_parameters(self) -> None:
        nn.init.ones_(self.gain)

    def write(self, state: Tensor, index: int, output: Tensor) -> Tensor:
        return state + apply_norm(output, Norm(self.gain[index], eps=self.eps, out_dtype=state.dtype))


class LayerNormScaling(Standard):
    """x_{l+1} = x_l + f_l(N(x_l) / sqrt(k)) in layer k = 1 .. M: both norms of a layer are divided by the square root
    of its number; the head's norm is not divided.

    Depth counts layers, not sublayers, as in the publication's code. According to the authors, start values that shrink
    with depth work against it, so models built with it have none, even GPT-2.

    Costs no parameters.

    Source: Sun et al., "The Curse of Depth in Large Language Models", arXiv 2502.05795.
    """

    name = "layernorm_scaling"
    traits = Traits(False, sums_to_one=False, has_query=False, starts_standard=False)
    even_start = True
    about = About("x + f(N x / sqrt(k)), layer k", "nothing", "3", "Sun et al., arXiv 2502.05795")

    def read(self, state: Tensor, index: int, norm: NormLike) -> tuple[Tensor, Tensor]:
        x, state = super().read(state, index, norm)
        return x * (1 + index // len(self.sublayers)) ** -0.5, state
