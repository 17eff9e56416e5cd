"""Keep the experts of a mixture evenly loaded through the bias of its router, and measure their loads.

A router scores every expert, s = sigmoid(W x), and assigns a token the k experts with the largest s + b; b does not
enter the experts' weights and gets no gradient. After a step b is updated from all its tokens, by one of two rules:

    sign       b_j += 1e-3 sign(mean load - load_j)                        (DeepSeek-V3, arXiv 2412.19437)
    quantile   b_j = the k/E-quantile of a_i - s_ij over the tokens i,     (Kimi K3, arXiv 2607.24653)
               where a_i is the (k+1)-th largest of s_i + b; minus the mean of b

With the second rule token i would choose expert j if b_j > a_i - s_ij, which is true for k/E of the tokens. Quantiles
are taken from a histogram of `BINS` bins: integer counts, whose sum does not depend on the number of processes or
micro-batches.
"""

from typing import Any

import torch
from torch import Tensor, nn

from attnres.errors import UserError

RATE = 1e-3
BINS = 1000
BIAS = "e_score_correction_bias"


class Balancer:
    """Counts the choices of a model's routers in training, and updates their biases after a step.

    Args:
        rule: "sign" or "quantile".
        who: the processes, each with a part of the tokens and complete routers.

    Attributes:
        load: the largest number of tokens of an expert in the last step, relative to the mean of its layer; of the
            worst layer.

    Raises:
        UserError: the model has no router that the rule applies to.
    """

    def __init__(self, model: nn.Module, rule: str, who: Any) -> None:
        self.rule, self.who = rule, who
        self.routers = [module for module in model.modules() if isinstance(getattr(module, BIAS, None), Tensor)]
        self.chosen = [_chosen_of(router) for router in self.routers]
        if not self.routers or 0 in self.chosen:
            raise UserError(
                f"optim.balance is {rule} and {type(model).__name__} has no routers of experts whose scores are "
                f"sigmoids with a correction bias ({BIAS}), as deepseek_v3 and kimi_linear have: leave balance out"
            )
        if rule == "quantile" and any(getattr(router, "num_group", 1) > 1 for router in self.routers):
            raise UserError(
                "optim.balance is quantile and the router chooses groups of experts first (n_group above 1), for which "
                "the quantile is no threshold: give sign"
            )
        self.load = 1.0
        self.loads = [torch.zeros_like(getattr(router, BIAS), dtype=torch.int64) for router in self.routers]
        bins = BINS if rule == "quantile" else 0
        self.histograms = [load.new_zeros(len(load), bins) for load in self.loads]
        for index, router in enumerate(self.routers):
            router.register_forward_hook(lambda module, _, output, index=index: self._count(index, module, output))

    @torch.no_grad()
    def _count(self, index: int, router: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        recomputed = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        if not router.training or recomputed:
            return
        logits, _, experts = output
        ones = torch.ones_like(experts.flatten())
        self.loads[index].index_add_(0, experts.flatten(), ones)
        if self.rule == "quantile":
            scores, bias = logits.float().sigmoid(), getattr(router, BIAS)
            threshold = (scores + bias).topk(self.chosen[index] + 1, -1).values[:, -1:]
            low, width = _range(bias)
            bins = ((threshold - scores - low) / width).long().clamp(0, BINS - 1)
            places = bins + BINS * torch.arange(len(bias), device=bins.device)
            self.histograms[index].view(-1).index_add_(0, places.flatten(), torch.ones_like(places.flatten()))

    @torch.no_grad()
    def update(self) -> None:
        """Update the biases after a step from the counts of all processes, and reset the counts."""
        for counts in (*self.loads, *(self.histograms if self.rule == "quantile" else ())):
            self.who.sum(counts)
        worst = [load.max() * len(load) / load.sum().clamp(min=1) for load in self.loads]
        self.load = torch.stack(worst).max().item()  # wait for the device once, not for each layer
        for index, router in enumerate(self.routers):
            bias, load = getattr(router, BIAS), self.loads[index].double()
            if self.rule == "sign":
                bias += RATE * (load.mean() - load).sign().to(bias.dtype)
            elif load.any():
                low, width = _range(bias)
                below = self.histograms[index].cumsum(-1)
                share = below[:, -1:] * self.chosen[index] / len(bias)
                quantile = low + width * ((below < share).sum(-1) + 0.5)
                bias.copy_(quantile - quantile.mean())
            self.loads[index].zero_()
            self.histograms[index].zero_()


def _range(bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the start and the bin width of the histogram, which covers all possible a_i - s_ij."""
    low = bias.min() - 1
    return low, (bias.max() + 1 - low) / BINS


@torch.no_grad()
def _chosen_of(router: Any) -> int:
    """Return how many experts a router assigns to a token; 0 if the rules do not apply to the router."""
    weight, bias = getattr(router, "weight", None), getattr(router, BIAS)
    if isinstance(bias, nn.Parameter) or not isinstance(weight, Tensor) or weight.ndim != 2 or len(weight) != len(bias):
        return 0
    x = torch.linspace(-1, 1, 2 * weight.shape[1], device=weight.device).view(2, -1).to(weight.dtype)
    output = router(x)
    if not isinstance(output, tuple) or len(output) != 3 or output[2].is_floating_point():
        return 0
    logits, weights, experts = output
    if logits.shape != (2, len(bias)) or experts.shape[-1] >= len(bias):
        return 0
    scores = logits.float().sigmoid().gather(1, experts)
    shares = [part.float() / part.float().sum(-1, keepdim=True) for part in (scores, weights)]
    return experts.shape[-1] if torch.allclose(*shares, rtol=1e-3) else 0
