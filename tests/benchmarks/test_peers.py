"""Peers read what we read, and one that cannot says why."""

import equality
import peers
import pytest
import torch
from equality import Inputs
from naive import naive_read
from peers import PEERS, Peer

from attnres import depth_read

CPU = torch.device("cpu")


def _ours(sources, query, gain, eps):
    return depth_read(sources, query, gain, eps=eps)


@pytest.mark.parametrize("read", [_ours, naive_read], ids=["ours", "naive"])
def test_the_equality_check_passes_a_right_read(read):
    result = equality.compare(read, Inputs(5, 16, 24, CPU, torch.float32))
    assert "reason" not in result
    assert max(part["relative_rms"] for part in result["errors"].values()) < 1e-5


def test_the_equality_check_fails_a_read_without_the_key_norms_gain():
    result = equality.compare(
        lambda sources, query, gain, eps: naive_read(sources, query, gain * 0 + 1, eps),
        Inputs(5, 16, 24, CPU, torch.float32),
    )
    assert result["reason"].startswith("wrong")


def test_a_read_that_raises_is_a_reason_and_no_crash():
    def refuse(sources, query, gain, eps):
        raise RuntimeError("no such kernel\nand more")

    assert equality.compare(refuse, Inputs(2, 4, 8, CPU, torch.float32)) == {"reason": "RuntimeError: no such kernel"}


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_every_peer_is_measured_or_says_why_not(peer: Peer):
    reason = peer.available(CPU, torch.float32, 24)
    if reason is not None:
        assert peer.package in reason
        pytest.skip(reason)
    result = equality.compare(peer.read, Inputs(5, 16, 24, CPU, torch.float32))
    assert max(part["relative_rms"] for part in result["errors"].values()) < 1e-5


def test_fla_naive_equals_ours():
    peer = peers.FLANaive()
    reason = peer.available(CPU, torch.float32, 24)
    if reason is not None:
        pytest.skip(reason)
    inputs = Inputs(6, 32, 24, CPU, torch.float32)
    ours, theirs = inputs.leaves(), inputs.leaves()
    h = _ours(ours[2:], ours[0], ours[1], 1e-6)
    their_h = peer.read(theirs[2:], theirs[0], theirs[1], 1e-6)
    torch.testing.assert_close(h, their_h, rtol=1e-5, atol=1e-6)
    h.backward(inputs.grad)
    their_h.backward(inputs.grad)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_a_peer_that_takes_cuda_or_bf16_alone_says_so(monkeypatch):
    class Known(Peer):
        name, package, dtypes = "known", "known", (torch.bfloat16,)

        def imported(self):
            pass

    monkeypatch.setattr(peers, "installed", lambda package: "1.0")
    assert Known().available(CPU, torch.bfloat16, 8) == "known 1.0 runs on CUDA alone"
    assert Known().available(torch.device("cuda"), torch.float32, 8) == "known 1.0 does not take float32"
    assert Known().available(torch.device("cuda"), torch.bfloat16, 8) is None
    assert peers.FlashAttnRes().refuses(7168) is not None


def test_fast_attnres_is_found_beside_this_package_of_the_same_name(tmp_path, monkeypatch):
    (tmp_path / "attnres").mkdir()
    (tmp_path / "attnres" / "__init__.py").write_text("attnres = 'theirs'\n")
    monkeypatch.setenv("ATTNRES_PEERS", str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "fast_attnres", raising=False)
    peers.load_fast_attnres.cache_clear()
    assert peers.load_fast_attnres().attnres == "theirs"
    peers.load_fast_attnres.cache_clear()
    monkeypatch.delitem(__import__("sys").modules, "fast_attnres")
    import attnres

    assert attnres.depth_read is depth_read
