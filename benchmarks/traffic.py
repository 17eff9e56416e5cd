"""Bytes that depth reads move, counted vector by vector, and the times that a memory bandwidth allows.

    python benchmarks/traffic.py                        # the tables, with times at 3,000 GB/s
    python benchmarks/traffic.py --bandwidth 1.7e12     # ... at a bandwidth of yours (reads.py measures a copy's)

The unit is one vector of width d, in the stream's dtype, per token: an fp32 vector beside a bf16 stream counts 2. What
is scalar per token (logits, maxima, 1/rms) is left out, and so is the one read of the output. A range is what depends
on a cache or on an implementation's choice, named in each function.

A network has N blocks of S sublayers. Before block j there are j + 1 sealed sources, so that their mean is (N + 1) / 2;
all but the first read of a block also take the partial sum.
"""

import argparse
from dataclasses import dataclass
from typing import NamedTuple

from harness import table

from attnres.models.step_cost import ADD, STANDARD, group, merge, read_sealed


class Range(NamedTuple):
    low: float
    high: float

    def __str__(self) -> str:
        low, high = f"{self.low:.1f}", f"{self.high:.1f}"
        return low if low == high else f"{low} to {high}"


@dataclass(frozen=True)
class Blocks:
    """N blocks of S sublayers."""

    blocks: int
    size: int

    @property
    def sublayers(self) -> int:
        return self.blocks * self.size

    @property
    def sealed(self) -> float:
        """Sealed sources of a read, on average."""
        return (self.blocks + 1) / 2

    @property
    def later(self) -> float:
        """The share of sublayers that are not the first of their block: their reads take the partial sum."""
        return (self.size - 1) / self.size

    @property
    def sources(self) -> float:
        """Sources of a read, on average."""
        return self.sealed + self.later


def norm_only(*, backward: bool = False) -> float:
    """What a pre-norm costs on its own: x from h; or dh from dx and h."""
    return 3 if backward else 2


# Training, forward and backward, per sublayer, with its pre-norm and its addition.


def standard() -> Range:
    """Addition and norm fused: h, f -> h, x. Backward: dx, h and the stream's gradient -> that gradient."""
    return Range(STANDARD, STANDARD)


def two_phase(net: Blocks) -> Range:
    """This package: phase 1 of a block's reads, S merges with norm, their backwards, sealed gradients once a block.

    The high end reads the sealed sources twice in both directions (registers do not hold them) and keeps the sums of
    their gradients in fp32. The Triton kernels write no h, which is one vector less for each sublayer but a block's
    first, and under bf16 autocast they store sources in bf16: docs/explanation/kernels.md has their bytes.
    """
    n, size = net.sealed, net.size
    low = group(n, [0, *[1] * (size - 1)], sums=1) / size
    return Range(low, low + 4 * n / size)


def two_phase_full(net: Blocks) -> float:
    """This package's Full in N groups of S sublayers: every output before a group is a sealed source of it."""
    n = 1 + (net.blocks - 1) / 2 * net.size
    return group(n, range(net.size), sums=0) / net.size


def fla(net: Blocks) -> Range:
    """Read by read with the norm fused, h made again in backward; autograd adds up each source's gradients.

    The partial sums over tokens for the query and for the norm's weight go to memory in fp32. The low end finds the
    backward's second look at the sources in the cache.
    """
    m = net.sources
    forward = m + 1
    backward = m + 1 + m + 4 + 4
    low = forward + backward + ADD * m + ADD * net.later
    return Range(low, low + m)


def fla_gluon(net: Blocks) -> Range:
    """As `fla`, with partial sums per program instead of per token, and the sources in shared memory."""
    low = fla(net).low - 8
    return Range(low, low)


def liger(net: Blocks) -> Range:
    """A stack for each read, the norm apart, the sources' second look in both directions from the cache."""
    m = net.sources
    forward = 2 * m + m + 1 + norm_only()
    backward = norm_only(backward=True) + 1 + m + m
    low = forward + backward + ADD * m + ADD * net.later
    return Range(low, low)


def flash_attn_res(net: Blocks) -> Range:
    """Two phases as one autograd function that makes every block again in backward (its sublayers are not counted).

    Gradients of outputs, and partial sums for the queries, are in fp32; the norm is apart. The high end adds the copies
    that a block's first sublayer makes.
    """
    n, size, later = net.sealed, net.size, net.later
    forward = n / size + 1 + ADD * later + norm_only() + ADD * later
    norm_backward = norm_only(backward=True) + 3  # its result is then cast to fp32
    merges = later * (ADD + 2 + 2 + 2 + 2)  # the sum undone; partial and output, gradient, partial's sum, result
    sealed = n / size + 2 + 2 + 2 + 2 * n / size
    low = 2 * forward + norm_backward + merges + sealed
    copies = (2 + 2 + 4) / size
    return Range(low, low + copies)


TRAINING = {
    "two phases (ours)": two_phase,
    "FLA": fla,
    "FLA Gluon": fla_gluon,
    "Liger": liger,
    "flash-attn-res": flash_attn_res,
}


# Inference, per sublayer.


def standard_inference() -> float:
    """h, f -> h (arXiv 2603.15031, Table 1)."""
    return 3


def hyper_connections_inference(streams: int, width: int) -> float:
    """mHC with m streams: (8m + 2) d + 2 m^2 + 4 m numbers (the same table)."""
    return 8 * streams + 2 + (2 * streams**2 + 4 * streams) / width


def full_inference(net: Blocks) -> float:
    """Full in two phases, groups of S sublayers (the same table)."""
    return net.size + net.blocks


def block_inference(net: Blocks, *, materialised: bool = False) -> float:
    """Block in two phases: N/S + 5 (the same table), which charges one of phase 2's two results to the sublayer.

    Both of them, the new partial sum and the read, go to memory: `materialised` counts N/S + 6.
    """
    return net.blocks / net.size + 5 + materialised


def two_phase_inference(net: Blocks) -> float:
    """This package, call by call: no h is kept, and the mean number of sealed sources is taken instead of the most."""
    size = net.size
    moved = read_sealed(net.sealed, size) + merge(0, added=False)
    if size > 1:
        moved += merge(1, added=False, kept=False) + (size - 2) * merge(1, added=True, kept=False) + ADD
    return moved / size


# One read of n sources on its own.


def read(n: int) -> float:
    """The least that a forward read moves: each source once, and the result."""
    return n + 1


def read_backward(n: int) -> float:
    """The least that its backward moves: the gradient, each source, and each source's gradient."""
    return 1 + 2 * n


def seconds(vectors: float, *, tokens: int, width: int, itemsize: int, bandwidth: float, sublayers: int = 1) -> float:
    """The time that so many vectors per token (and sublayer) take at `bandwidth` bytes a second."""
    return vectors * tokens * width * itemsize * sublayers / bandwidth


def training_table() -> str:
    """Vectors per token per sublayer, forward and backward."""
    rows = [["blocks, sublayers a block", "standard", *TRAINING]]
    for net in (Blocks(8, 4), Blocks(9, 6), Blocks(8, 24)):
        rows.append([f"{net.blocks}, {net.size}", str(standard()), *(str(count(net)) for count in TRAINING.values())])
    return table(rows)


def inference_table(net: Blocks, streams: int, width: int) -> str:
    """The paper's Table 1, and what is really written."""
    return table(
        [
            ["inference", "vectors"],
            ["standard", f"{standard_inference():.2f}"],
            [f"mHC, {streams} streams", f"{hyper_connections_inference(streams, width):.2f}"],
            ["Full, two phases", f"{full_inference(net):.2f}"],
            ["Block, two phases (the paper's count)", f"{block_inference(net):.2f}"],
            ["Block, two phases, both results written", f"{block_inference(net, materialised=True):.2f}"],
            ["Block, this package call by call", f"{two_phase_inference(net):.2f}"],
        ]
    )


def prediction_table(bandwidth: float) -> str:
    """Times of the shapes that the benchmarks measure, if nothing but memory counts."""

    def span(count: Range, **shape: int) -> str:
        low, high = (seconds(v, itemsize=2, bandwidth=bandwidth, **shape) * 1e3 for v in count)
        return f"{low:.3g}" if f"{low:.3g}" == f"{high:.3g}" else f"{low:.3g} to {high:.3g}"

    stack = {"tokens": 65_536, "width": 2048, "sublayers": 32}
    small = {"tokens": 8192, "width": 1024, "sublayers": 56}
    net, small_net = Blocks(4, 8), Blocks(8, 7)
    extra = Range(*(count - standard().low for count in two_phase(small_net)))
    one = {"tokens": 8192, "width": 7168}
    rows = [["bf16 stream", "ms"]]
    rows.append(["read forward, d=7168, 9 sources, 8,192 tokens", span(Range(read(9), read(9)), **one)])
    rows.append(["read backward, the same", span(Range(read_backward(9), read_backward(9)), **one)])
    for name, count in {"standard": lambda _: standard(), **TRAINING}.items():
        rows.append([f"stack of 32 norms, S=8, 65,536 tokens, d=2048: {name}", span(count(net), **stack)])
    rows.append(["0.6b, S=7, 8,192 tokens: Block's step beyond standard's", span(extra, **small)])
    return table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bandwidth", type=float, default=3.0e12, help="bytes a second, of the predicted times")
    options = parser.parse_args()
    print("Training, forward and backward: vectors of width d per token per sublayer, pre-norm and addition included\n")
    print(training_table())
    print("\nInference, 8 blocks of 16 sublayers, d=4096\n")
    print(inference_table(Blocks(8, 16), 4, 4096))
    print(f"\nPredicted (not measured) at {options.bandwidth / 1e9:.4g} GB/s\n")
    print(prediction_table(options.bandwidth))


if __name__ == "__main__":
    main()
