"""Other people's depth reads behind one interface, for equality checks and timing beside ours.

    python benchmarks/peers.py        # which of them are here, how far from the fp64 oracle, what to install
    pip install --no-deps --target build/peers fla-core einops liger-kernel flash-attn-res fast-attnres attn_res

They live in a folder of their own (`build/peers`, or the folder that ATTNRES_PEERS names), never in the environment:
fast-attnres installs a top-level package that is also called `attnres`, which would take the place of this one. Only
their public functions are called. A peer that is missing, or that refuses a device, dtype or width, says why.
"""

import argparse
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
from equality import Inputs, compare
from harness import DTYPES, attempt, table
from torch import Tensor, nn

PACKAGES = ("fla-core", "einops", "liger-kernel", "flash-attn-res", "fast-attnres", "attn_res")
INSTALL = f"pip install --no-deps --target build/peers {' '.join(PACKAGES)}"


def folder() -> Path:
    """Where the peers are installed."""
    return Path(os.environ.get("ATTNRES_PEERS") or Path(__file__).resolve().parent.parent / "build" / "peers")


@functools.cache
def load(name: str) -> ModuleType:
    """The module `name` from the peers' folder or the environment. Raises ImportError.

    The folder comes last on the path, so that nothing in it takes the place of what is installed.
    """
    place = str(folder())
    if folder().is_dir() and place not in sys.path:
        sys.path.append(place)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


@functools.cache
def load_fast_attnres() -> ModuleType:
    """fast-attnres under the name `fast_attnres`: its own, `attnres`, is taken. Raises ImportError."""
    init = folder() / "attnres" / "__init__.py"
    if not init.is_file():
        raise ImportError(f"{init} is not there")
    spec = importlib.util.spec_from_file_location("fast_attnres", init, submodule_search_locations=[str(init.parent)])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fast_attnres"] = module
    spec.loader.exec_module(module)
    return module


def installed(package: str) -> str | None:
    """The version of a package in the peers' folder, else in the environment."""
    wanted = package.lower().replace("_", "-")
    for distribution in importlib.metadata.distributions(path=[str(folder())]):
        if distribution.metadata["Name"].lower().replace("_", "-") == wanted:
            return distribution.version
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


class Peer:
    """One implementation of the read

        h = sum_i a_i v_i,    a = softmax_i( w . (g * v_i / sqrt(mean(v_i^2) + eps)) )

    Attributes:
        name: in tables and plots. package: what pip calls it.
        dtypes: of the sources it takes. needs_cuda: whether it runs on CUDA alone.
        whole: whether it has a function for a whole network.
        fuses_norm: whether `read` takes the norm's weight.
    """

    name: ClassVar[str]
    package: ClassVar[str]
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16)
    needs_cuda: ClassVar[bool] = True
    whole: ClassVar[bool] = False
    fuses_norm: ClassVar[bool] = False

    def imported(self) -> None:
        """Import what is used. Raises ImportError."""
        raise NotImplementedError

    def available(
        self, device: torch.device | None = None, dtype: torch.dtype | None = None, width: int | None = None
    ) -> str | None:
        """None, or the reason why it cannot run (on this device, with this dtype and width)."""
        version = installed(self.package)
        if version is None:
            return f"{self.package} is not installed"
        try:
            self.imported()
        except Exception as error:  # a peer's own checks at import time as well
            return f"{self.package} {version} cannot be imported ({type(error).__name__}: {str(error)[:120]})"
        if self.needs_cuda and device is not None and device.type != "cuda":
            return f"{self.package} {version} runs on CUDA alone"
        if dtype is not None and dtype not in self.dtypes:
            return f"{self.package} {version} does not take {str(dtype).removeprefix('torch.')}"
        return self.refuses(width) if width is not None else None

    def refuses(self, width: int) -> str | None:
        """Why this width cannot be taken, if it cannot."""
        return None

    def read(
        self, sources: Sequence[Tensor], query: Tensor, gain: Tensor, eps: float, norm: Tensor | None = None
    ) -> Tensor:
        """One differentiable read of sources (..., d); then its RMSNorm with weight `norm`, only if `fuses_norm`."""
        raise NotImplementedError

    def block(
        self, sources: Sequence[Tensor], queries: Tensor, gains: Tensor, eps: float, layer: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """The sum of a block's S sublayers `layer` over n sealed sources, read by read unless the peer knows better."""
        partial = None
        for query, gain in zip(queries, gains, strict=True):
            output = layer(self.read(sources if partial is None else [*sources, partial], query, gain, eps))
            partial = output if partial is None else partial + output
        assert partial is not None
        return partial

    def network(
        self,
        embedding: Tensor,
        queries: Tensor,
        gains: Tensor,
        eps: float,
        layers: Sequence[nn.Module],
        block_size: int,
    ) -> Tensor:
        """A network of `layers` and the output's read (the last of L + 1 queries): block by block, unless `whole`."""
        blocks = [embedding]
        for start in range(0, len(layers), block_size):
            turn = iter(layers[start : start + block_size])
            rows = slice(start, min(start + block_size, len(layers)))
            blocks.append(self.block(blocks, queries[rows], gains[rows], eps, lambda x, turn=turn: next(turn)(x)))
        return self.read(blocks, queries[-1], gains[-1], eps)


class FLANaive(Peer):
    name, package, needs_cuda = "fla naive", "fla-core", False
    fuses_norm = True

    def imported(self) -> None:
        self.call = load("fla.ops.attnres").naive_attnres

    def read(self, sources, query, gain, eps, norm=None):
        return self.call(query, [source.contiguous() for source in sources], gain, norm, eps)


class FLA(Peer):
    """Its Triton kernels; level 1 (its default) makes h again in backward, level 0 keeps it."""

    package, fuses_norm = "fla-core", True

    def __init__(self, level: int = 1):
        self.level = level
        self.name = "fla" if level == 1 else f"fla, level {level}"  # ty: ignore[invalid-attribute-access]

    def imported(self) -> None:
        load("triton")
        self.call = load("fla.ops.attnres").fused_attnres

    def read(self, sources, query, gain, eps, norm=None):
        return self.call(query, list(sources), gain, norm, eps, checkpoint_level=self.level)


@contextmanager
def _environment(name: str, value: str) -> Generator[None]:
    old = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if old is None:
            del os.environ[name]
        else:
            os.environ[name] = old


class FLAGluon(FLA):
    """Its Gluon kernels, which it takes only when asked to through the environment."""

    def __init__(self) -> None:
        super().__init__(1)
        self.name = "fla gluon"  # ty: ignore[invalid-attribute-access]

    def imported(self) -> None:
        load("triton.experimental.gluon")
        super().imported()

    def available(self, device=None, dtype=None, width=None):
        reason = super().available(device, dtype, width)
        if reason is not None or device is None or dtype is None or width is None:
            return reason
        # A refusal falls back to Triton without a word: look at who made the result.
        sources = [torch.zeros(4, width, device=device, dtype=dtype, requires_grad=True) for _ in range(2)]
        vector = torch.ones(width, device=device)
        made: list[Any] = []
        failed = attempt(lambda: made.append(self.read(sources, vector, vector, 1e-6).grad_fn))
        if failed:
            return f"fla-core's Gluon kernels fail here ({failed})"
        node = made[0]
        names = {node.name(), *(later.name() for later, _ in node.next_functions if later is not None)}
        return None if any("Gluon" in name for name in names) else "fla-core falls back from Gluon to Triton here"

    def read(self, sources, query, gain, eps, norm=None):
        with _environment("FLA_ATTNRES_GLUON", "1"):
            return super().read(sources, query, gain, eps, norm)


class Liger(Peer):
    """Takes a stack of the sources."""

    name, package = "liger", "liger-kernel"

    def imported(self) -> None:
        self.call = load("liger_kernel.transformers.functional").liger_attn_res

    def read(self, sources, query, gain, eps, norm=None):
        return self.call(torch.stack(tuple(sources)), query, gain, eps)


def _power_of_two(width: int) -> bool:
    return width & (width - 1) == 0


class FlashAttnRes(Peer):
    """Two phases over a stack (B, T, d of bf16), and one autograd function for a whole network. It knows no gain."""

    name, package = "flash-attn-res", "flash-attn-res"
    dtypes = (torch.bfloat16,)
    whole = True

    def imported(self) -> None:
        package = load("flash_attn_res")
        self.phase_1, self.phase_2 = (
            package.phase_1_batched_attention_triton_op,
            package.phase_2_online_softmax_merge_triton_op,
        )
        self.function = load("flash_attn_res.experimental.autograd").BlockAttentionResiduals

    def refuses(self, width: int) -> str | None:
        return None if _power_of_two(width) else f"flash-attn-res takes widths that are powers of two, not {width}"

    @staticmethod
    def _stack(sources: Sequence[Tensor]) -> Tensor:
        return torch.stack([source.reshape(1, -1, source.shape[-1]) for source in sources])

    def read(self, sources, query, gain, eps, norm=None):
        return self.phase_1(self._stack(sources), (query * gain).unsqueeze(0), eps)[0][0].view(sources[0].shape)

    def block(self, sources, queries, gains, eps, layer):
        scaled, shape = queries * gains, (1, -1, sources[0].shape[-1])
        outputs, lse = self.phase_1(self._stack(sources), scaled, eps)
        partial = layer(outputs[0])
        for i in range(1, len(scaled)):
            h = self.phase_2(partial.reshape(shape), scaled[i], outputs[i], lse[i], eps)
            partial = partial + layer(h)
        return partial.reshape(sources[0].shape)

    def network(self, embedding, queries, gains, eps, layers, block_size):
        parameters = [parameter for layer in layers for parameter in layer.parameters()]
        flat = embedding.reshape(1, -1, embedding.shape[-1])
        out = self.function.apply(flat, queries * gains, list(layers), block_size, eps, *parameters)
        return out.view(embedding.shape)


class FastAttnRes(Peer):
    """bf16 sources and a bf16 query; it knows no gain. Its multi-query reads give no log-sum-exp to merge with."""

    name, package = "fast-attnres", "fast-attnres"
    dtypes = (torch.bfloat16,)

    def imported(self) -> None:
        load("triton")
        self.call = load_fast_attnres().attnres

    def refuses(self, width: int) -> str | None:
        return None if width <= 8192 else f"fast-attnres takes widths up to 8192, not {width}"

    def read(self, sources, query, gain, eps, norm=None):
        return self.call(tuple(sources), (query * gain).to(torch.bfloat16), eps=eps)


class AttnRes(Peer):
    """Plain torch in the sources' own dtype; it knows no gain."""

    name, package, needs_cuda = "attn_res", "attn_res", False
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

    def imported(self) -> None:
        self.operator = load("attn_res").AttnResOperator

    def read(self, sources, query, gain, eps, norm=None):
        with torch.device("meta"):
            operator = self.operator(sources[0].shape[-1], eps=eps)
        stack = torch.stack([source.reshape(1, -1, source.shape[-1]) for source in sources])
        scaled = {"pseudo_query": (query * gain).to(stack.dtype)}
        return torch.func.functional_call(operator, scaled, (stack,)).view(sources[0].shape)


PEERS: tuple[Peer, ...] = (
    FLANaive(),
    FLA(1),
    FLA(0),
    FLAGluon(),
    Liger(),
    FlashAttnRes(),
    FastAttnRes(),
    AttnRes(),
)


def able(
    n: int, tokens: int, width: int, device: torch.device, dtype: torch.dtype
) -> tuple[list[Peer], dict[str, Any]]:
    """The peers that read these shapes rightly, and what `compare` says of each."""
    inputs = Inputs(n, tokens, width, device, dtype)
    able_peers = {}
    for peer in PEERS:
        reason = peer.available(device, dtype, width)
        able_peers[peer.name] = {"reason": reason} if reason is not None else compare(peer.read, inputs)
    return [peer for peer in PEERS if "reason" not in able_peers[peer.name]], able_peers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=sorted(DTYPES))
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--sources", type=int, default=5)
    options = parser.parse_args()
    print(f"peers in {folder()}; for those that are missing:\n  {INSTALL}\n")
    rows = [["peer", "package", "dtype", "max error h", "query", "gain", "sources", ""]]
    for dtype in options.dtypes:
        _, reasons = able(options.sources, 64, options.width, torch.device(options.device), DTYPES[dtype])
        for peer in PEERS:
            entry = reasons[peer.name]
            shown = [f"{error['max']:.1e}" for error in entry.get("errors", {}).values()] or ["-"] * 4
            package = f"{peer.package} {installed(peer.package) or ''}".strip()
            rows.append([peer.name, package, dtype, *shown, entry.get("reason", "")])
    print(table(rows))


if __name__ == "__main__":
    main()
