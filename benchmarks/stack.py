"""A whole network whose sublayers do nothing: what its depth reads cost, forward + backward, beside the peers.

    python benchmarks/stack.py        # 32 sublayers, S=8, 4 x 16,384 tokens, d=2048 on a GPU; small on a CPU
    python benchmarks/stack.py --sublayers 24 --block-size 6 --width 4096

Two kinds of sublayer: `identity` (f(h) = h, as in the published comparison of flash-attn-res) and `norm` (an RMSNorm,
what every pre-norm sublayer begins with; a fused norm counts here). Peers run read by read in the same stream, or by
their function for whole networks where they have one. Before it is timed, each candidate's output and embedding
gradient are held against the naive network in fp64: depth reads go token by token, so its first tokens suffice.
"""

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import torch
import traffic
from equality import WRONG
from harness import DTYPES
from naive import EPS, block_name, register_naive
from peers import PEERS, Peer
from torch import Tensor, nn

from attnres.files import write_json
from attnres.ops import Norm
from attnres.residuals import Residual, make_residual

DEFAULTS = {
    "cuda": {"sublayers": 32, "block_size": 8, "tokens": 65_536, "width": 2048},
    "cpu": {"sublayers": 8, "block_size": 4, "tokens": 2048, "width": 256},
}
CHECKED = 64
"""Tokens that the fp64 network computes."""


class Network:
    """`sublayers` of one kind with one residual, whose queries are drawn from `seed`; float parameters stay fp32."""

    def __init__(
        self,
        residual: str,
        kind: str,
        *,
        sublayers: int,
        width: int,
        device: torch.device,
        seed: int,
        settings: dict[str, Any] | None = None,
    ):
        self.residual: Residual = make_residual(residual, sublayers, width, **(settings or {})).to(device)
        self.weight = torch.ones(width, device=device, requires_grad=True) if kind == "norm" else None
        self.sublayers = sublayers
        if hasattr(self.residual, "query"):
            generator = torch.Generator().manual_seed(seed)
            drawn = harness.randn((sublayers + 1, width), generator, device, torch.float32) / width**0.5
            with torch.no_grad():
                self.residual.query.copy_(drawn.bfloat16())  # ty: ignore[not-callable]

    def __call__(self, embedding: Tensor) -> Tensor:
        norm = (lambda h: h) if self.weight is None else Norm(self.weight, None, EPS, out_dtype=embedding.dtype)
        state = self.residual.start(embedding)
        for i in range(self.sublayers):
            x, state = self.residual.read(state, i, norm)
            state = self.residual.write(state, i, x if isinstance(x, Tensor) else x.query + x.key + x.value)
        return self.residual.finish(state, norm)

    def parameters(self) -> list[Tensor]:
        return [*self.residual.parameters(), *([] if self.weight is None else [self.weight])]


class PeerNetwork:
    """The same with a peer's own function for whole networks."""

    def __init__(self, peer: Peer, like: Network, block_size: int, dtype: torch.dtype):
        self.peer, self.like, self.block_size = peer, like, block_size
        width, device = like.residual.width, next(like.residual.parameters()).device
        norms = like.weight is not None

        def layer() -> nn.Module:
            return nn.RMSNorm(width, eps=EPS, device=device, dtype=dtype) if norms else nn.Identity()

        self.layers = [layer() for _ in range(like.sublayers)]
        self.final = layer()

    def __call__(self, embedding: Tensor) -> Tensor:
        query, gain = self.like.residual.query, self.like.residual.gain
        args: Any = (embedding, query, gain, EPS, self.layers, self.block_size)
        return self.final(self.peer.network(*args))

    def parameters(self) -> list[Tensor]:
        parameters = [*self.like.residual.parameters()]
        return parameters + [parameter for layer in (*self.layers, self.final) for parameter in layer.parameters()]


def gradients(
    network: Network | PeerNetwork, call: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor
) -> list[Tensor]:
    """Output and embedding gradient of one forward and backward; gradients of the parameters are made as well."""
    embedding = x.detach().requires_grad_()
    out = call(embedding)
    wanted = [embedding, *(p for p in network.parameters() if p.requires_grad)]
    return [out.detach(), torch.autograd.grad(out, wanted, grad.to(out.dtype), allow_unused=True)[0]]


def relative_rms(mine: list[Tensor], exact: list[Tensor]) -> dict[str, float]:
    """Relative rms error of output and embedding gradient on the tokens that were computed exactly."""
    errors = {}
    for name, a, b in zip(("output", "gradient"), mine, exact, strict=True):
        errors[name] = ((a[: len(b)].double() - b).square().mean().sqrt() / b.square().mean().sqrt()).item()
    return errors


COUNTS: dict[str, Callable[[traffic.Blocks], traffic.Range]] = {
    "standard": lambda _: traffic.standard(),
    "ours": traffic.two_phase,
    "fla": traffic.fla,
    "fla gluon": traffic.fla_gluon,
    "liger": traffic.liger,
    "flash-attn-res, whole network": traffic.flash_attn_res,
}
"""Whose bytes are known, for sublayers that are a norm."""


class Stack:
    """The networks of one kind of sublayer, ours first: `steps` are those that compute the right thing."""

    def __init__(
        self,
        kind: str,
        x: Tensor,
        grad: Tensor,
        *,
        sublayers: int,
        block_size: int,
        seed: int,
        compiled: bool,
        peers: list[Peer],
        until: float = math.inf,
    ):
        self.x, self.grad, self.block_size = x, grad, block_size
        self.shape: dict[str, Any] = {"sublayers": sublayers, "width": x.shape[-1], "device": x.device, "seed": seed}
        self.kind, self.settings = kind, {"block_size": block_size}
        self.networks: dict[str, Network | PeerNetwork] = {
            "ours": self._network("block", self.settings),
            "standard": self._network("standard"),
            "full (ours)": self._network("full"),
            "naive": (naive := self._network("naive_block", self.settings)),
        }
        self.calls: dict[str, Callable[[Tensor], Tensor]] = dict(self.networks)
        for label in ("ours", "standard", "naive") if compiled else ():
            name = f"{label}, compiled"
            self.networks[name] = self.networks[label]
            self.calls[name] = torch.compile(self.networks[label].__call__, dynamic=False)
        for peer in peers:
            self._add(peer.name, self._network(block_name(peer), self.settings))
            if peer.whole:
                self._add(f"{peer.name}, whole network", PeerNetwork(peer, naive, block_size, x.dtype))
        self.rows: dict[str, dict[str, Any]] = {}
        self.steps: dict[str, Callable[[], Any]] = {}
        self._check([peer.name for peer in peers], until)

    def _network(self, residual: str, settings: dict[str, Any] | None = None) -> Network:
        return Network(residual, self.kind, **self.shape, settings=settings)

    def _add(self, label: str, network: Network | PeerNetwork) -> None:
        self.networks[label] = self.calls[label] = network

    def _exact(self, residual: str, settings: dict[str, Any] | None = None) -> list[Tensor]:
        oracle = self._network(residual, settings)
        oracle.residual.double()
        if oracle.weight is not None:
            oracle.weight = oracle.weight.detach().double().requires_grad_()
        return gradients(oracle, oracle, self.x[:CHECKED].double(), self.grad[:CHECKED].double())

    def _check(self, peers: list[str], until: float) -> None:
        """Fill `rows` with errors and reasons, and `steps` with what may be timed. A peer's first call tunes it."""
        block = self._exact("naive_block", self.settings)
        exact = {"standard": self._exact("standard"), "full (ours)": self._exact("naive_full")}
        most = 2 * WRONG if self.x.dtype == torch.bfloat16 else WRONG
        for label, call in self.calls.items():
            if label.split(",")[0] in peers and time.monotonic() > until:
                self.rows[label] = {"reason": "not begun: the time for tuning was spent"}
                continue
            step = partial(gradients, self.networks[label], call, self.x, self.grad)
            made: list[Tensor] = []
            reason = harness.attempt(lambda made=made, step=step: made.extend(step()))
            if reason is not None:
                self.rows[label] = {"reason": reason}
                continue
            error = relative_rms(made, exact.get(label.removesuffix(", compiled"), block))
            self.rows[label] = {"relative_rms": error, "max_error": max(error.values())}
            if max(error.values()) <= most:
                self.steps[label] = step
            else:
                self.rows[label]["reason"] = f"wrong: relative rms error {max(error.values()):.2g}"

    def bytes(self) -> dict[str, float]:
        """What is known to be moved, at the low end."""
        blocks = traffic.Blocks(self.shape["sublayers"] // self.block_size, self.block_size)
        unit = self.x.numel() * self.x.element_size() * self.shape["sublayers"]
        return {label: count(blocks).low * unit for label, count in COUNTS.items()} if self.kind == "norm" else {}


def run(
    device: torch.device,
    dtype: torch.dtype,
    *,
    sublayers: int,
    block_size: int,
    tokens: int,
    width: int,
    seconds: float,
    seed: int,
    compiled: bool,
    tuning: float = math.inf,
    say: Callable[[str], None] = print,
    keep: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Both kinds of sublayer; `say` is given each table as it is finished, `keep` all that is. After `tuning` seconds
    no further peer is begun."""
    until = time.monotonic() + tuning
    generator = torch.Generator().manual_seed(seed)
    x = harness.randn((tokens, width), generator, device, dtype)
    grad = harness.randn((tokens, width), generator, device, dtype)
    copy = harness.copy_bandwidth(device)
    say(f"a copy on this device: {copy / 1e9:.4g} GB/s\n")
    reasons = {peer.name: peer.available(device, dtype, width) for peer in PEERS}
    ready = [peer for peer in PEERS if reasons[peer.name] is None]
    register_naive(ready)
    result: dict[str, Any] = {"copy_bytes_per_s": copy, "kinds": {}}
    bar = harness.progress("stack", 2)
    how: dict[str, Any] = {"sublayers": sublayers, "block_size": block_size, "seed": seed, "compiled": compiled}
    for kind in ("identity", "norm"):
        stack = Stack(kind, x, grad, **how, peers=ready, until=until)
        measured = harness.measure(stack.steps, device, seconds=seconds, nbytes=stack.bytes(), copy=copy)
        rows = {label: measured.get(label, {}) | row for label, row in stack.rows.items()}
        rows |= {name: {"reason": reason} for name, reason in reasons.items() if reason is not None}
        result["kinds"][kind] = rows
        say(f"{kind} sublayers, forward + backward (errors: relative rms against fp64)\n{harness.lines(rows)}\n")
        keep(result)
        bar.advance(1, kind)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_device(parser)
    for name in DEFAULTS["cpu"]:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=None)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None, help="compiled ones as well")
    parser.add_argument("--tuning", type=float, default=math.inf, help="seconds after which no peer is begun")
    options = parser.parse_args()
    device = harness.settle(options, "stack")
    compiled = device.type == "cuda" if options.compile is None else options.compile
    if compiled:
        harness.compile_many()
    values = {name: getattr(options, name) for name in DEFAULTS["cpu"]}
    shape: dict[str, Any] = DEFAULTS[device.type] | {name: value for name, value in values.items() if value is not None}
    head: dict[str, Any] = harness.head("stack", device, options.dtype, options.seed) | {"shape": shape}
    dtype = DTYPES[options.dtype]
    how: dict[str, Any] = {"seconds": options.seconds, "seed": options.seed, "compiled": compiled}
    how["tuning"] = options.tuning
    result = head | run(device, dtype, **shape, **how, keep=lambda parts: write_json(options.out, head | parts))
    panels = {
        f"{kind} sublayers": {name: row["median_s"] * 1e3 for name, row in rows.items() if "median_s" in row}
        for kind, rows in result["kinds"].items()
    }
    title = "{sublayers} sublayers, S={block_size}, {tokens:,} tokens, d={width}".format(**shape)
    harness.finish(options.out, result, panels, "ms, forward + backward", f"{title}, {result['environment']['device']}")


if __name__ == "__main__":
    main()
