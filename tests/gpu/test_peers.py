"""Our read and other people's on the same inputs: the same function, and ours no further from the fp64 oracle.

Peers are installed apart (`python benchmarks/peers.py` says how); each that is missing, or that refuses the device,
dtype or width, is skipped with its reason.
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from attnres import Norm, depth_read

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAMES = ["fla naive", "fla", "fla, level 0", "fla gluon", "liger", "flash-attn-res", "fast-attnres", "attn_res"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(scope="module")
def peers() -> ModuleType:
    """benchmarks/peers.py, which stands beside the modules it imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import peers

        return peers


@pytest.fixture(scope="module")
def equality(peers: ModuleType) -> ModuleType:
    """benchmarks/equality.py."""
    return sys.modules["equality"]  # peers imports it


def peer_of(peers: ModuleType, name: str, device: str, dtype: torch.dtype, width: int) -> Any:
    (peer,) = [peer for peer in peers.PEERS if peer.name == name]
    reason = peer.available(torch.device(device), dtype, width)
    if reason is not None:
        pytest.skip(reason)
    return peer


def ours(sources: Any, query: Any, gain: Any, eps: float) -> torch.Tensor:
    read = depth_read(sources, query, gain, eps=eps)
    assert isinstance(read, torch.Tensor)
    return read


def test_every_peer_of_the_benchmarks_is_tested_here(peers: ModuleType) -> None:
    assert [peer.name for peer in peers.PEERS] == NAMES


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("sources", [2, 5, 9])
def test_the_read_is_theirs(
    peers: ModuleType, equality: ModuleType, device: str, name: str, dtype: str, sources: int
) -> None:
    width, tokens = (2048, 1024) if device == "cuda" else (64, 37)
    peer = peer_of(peers, name, device, DTYPES[dtype], width)
    inputs = equality.Inputs(sources, tokens, width, torch.device(device), DTYPES[dtype])
    theirs, mine = equality.errors(peer.read, inputs), equality.errors(ours, inputs)
    for part, error in theirs.items():
        # Theirs within rounding of the oracle means: the same function. Peers round more than once in bf16.
        assert error["relative_rms"] < (1e-4 if dtype == "fp32" else equality.WRONG), f"{name}, {part}: {error}"
        bar = 1.2 * error["relative_rms"] + (1e-6 if dtype == "fp32" else 1e-4)
        assert mine[part]["relative_rms"] <= bar, f"{part}: {mine[part]} against {name}'s {error}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["fla naive", "fla", "fla, level 0", "fla gluon"])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_the_read_with_its_norm_is_theirs(
    peers: ModuleType, equality: ModuleType, device: str, name: str, dtype: str
) -> None:
    width, tokens = (2048, 1024) if device == "cuda" else (64, 37)
    peer = peer_of(peers, name, device, DTYPES[dtype], width)
    inputs = equality.Inputs(5, tokens, width, torch.device(device), DTYPES[dtype])
    query, gain, *sources = inputs.leaves()
    weight = torch.linspace(0.5, 1.5, width, device=device)
    theirs = peer.read(sources, query, gain, 1e-6, weight)
    mine = depth_read(sources, query, gain, eps=1e-6, norm=Norm(weight, eps=1e-6))
    assert isinstance(mine, torch.Tensor)
    close = 1e-5 if dtype == "fp32" else 2e-2
    assert (mine.float() - theirs.float()).norm() <= close * theirs.float().norm()
    leaves = [query, gain, *sources]
    gradients = [torch.autograd.grad(x, leaves, inputs.grad.to(x.dtype)) for x in (mine, theirs)]
    for a, b in zip(*gradients):
        assert (a.float() - b.float()).norm() <= 5 * close * b.float().norm()
