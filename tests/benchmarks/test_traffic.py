"""The traffic model gives the counts that it was derived from."""

import pytest
import torch
import traffic
from traffic import Blocks

from attnres.models import build
from attnres.models.step_cost import step_vectors
from attnres.residuals import make_residual
from attnres.scale.plan import Load, beside_standard, plan


def test_inference_counts_are_those_of_the_papers_table():
    net = Blocks(8, 16)
    assert traffic.standard_inference() == 3
    assert traffic.full_inference(net) == 24
    assert traffic.block_inference(net) == 5.5
    assert traffic.block_inference(net, materialised=True) == 6.5
    assert traffic.hyper_connections_inference(4, 4096) == pytest.approx(34, abs=0.02)


# Vectors per token per sublayer, forward and backward, as counted by hand: (N, S) -> lowest and highest.
TRAINING = {
    (8, 4): {"ours": (17, 21), "FLA": (44, 49), "FLA Gluon": (36, 36), "Liger": (51, 51), "flash-attn-res": (41, 41)},
    (9, 6): {"ours": (16, 19), "FLA": (48, 53), "FLA Gluon": (40, 40), "Liger": (56, 56), "flash-attn-res": (41, 41)},
    (8, 24): {"ours": (14, 15), "FLA": (46, 51), "FLA Gluon": (38, 38), "Liger": (54, 54), "flash-attn-res": (41, 41)},
}


@pytest.mark.parametrize("shape", TRAINING, ids=lambda shape: f"N{shape[0]}-S{shape[1]}")
@pytest.mark.parametrize("who", ["ours", "FLA", "FLA Gluon", "Liger"])
def test_training_counts_lie_within_a_vector_of_the_hand_count(shape, who):
    count = traffic.TRAINING["two phases (ours)" if who == "ours" else who](Blocks(*shape))
    low, high = TRAINING[shape][who]
    assert count.low == pytest.approx(low, abs=0.75)
    assert count.high == pytest.approx(high, abs=0.75)


@pytest.mark.parametrize("shape", TRAINING, ids=lambda shape: f"N{shape[0]}-S{shape[1]}")
def test_flash_attn_res_moves_41_vectors_and_the_copies_at_a_blocks_start(shape):
    count = traffic.flash_attn_res(Blocks(*shape))
    assert count.low == pytest.approx(41, abs=0.75)
    assert count.high - count.low == pytest.approx(8 / shape[1])


def test_a_network_of_one_long_block_moves_what_two_phases_need_for_it():
    assert traffic.two_phase(Blocks(1, 1)).low > traffic.standard().low
    assert traffic.two_phase(Blocks(8, 1)).low > traffic.two_phase(Blocks(8, 2)).low


SHAPE = {"family": "qwen3", "hidden_size": 64, "num_hidden_layers": 12, "num_attention_heads": 2, "head_dim": 32}
SHAPE |= {"num_key_value_heads": 1, "intermediate_size": 128}


@pytest.mark.long
@pytest.mark.parametrize(
    ("residual", "settings", "vectors"),
    [
        ("standard", {}, 24 * traffic.standard().low),
        ("block", {"block_size": 6}, 24 * traffic.two_phase(traffic.Blocks(4, 6)).low),
        ("block", {"num_blocks": 2}, 24 * traffic.two_phase(traffic.Blocks(2, 12)).low),
        ("full", {"group": 6}, 24 * traffic.two_phase_full(traffic.Blocks(4, 6))),
    ],
)
def test_depth_reads_take_the_time_of_their_bytes(residual, settings, vectors):
    """Bytes of the traffic model for 24 sublayers, two sequences of 1,024 tokens a micro-batch, in fp32."""
    with torch.device("meta"):
        model = build(SHAPE, residual, vocab_size=65536, settings=settings)
    load = Load(8, context=1024, batch=2, microbatches=3)
    (row,) = plan(model, load, dp=8, pp=1, tp=1, shard=1)
    assert row.read_bytes == vectors * 2 * 1024 * 3 * 64 * 4
    base = beside_standard(model, load, row)
    assert (base.dp, base.seconds <= row.seconds, base.seconds < row.seconds) == (8, True, residual != "standard")


def test_full_moves_what_a_count_by_hand_says():
    """Groups of two sublayers, forward: n sources in and two outputs out; x of the first read; of the second the open
    source, the phase-1 output, h and x. Backward: the sources, two gradients, carried gradients in, gradients out; 3
    for the first merge, 6 for the second."""
    counted = sum((n + 2) + (1 + 1) + (1 + 1 + 1 + 1) + (n + 2 + n + n) + 3 + 6 for n in (1, 3, 5))
    assert step_vectors(make_residual("full", 6, 8, group=2)) == counted
    assert 6 * traffic.two_phase_full(traffic.Blocks(3, 2)) == counted
    assert step_vectors(make_residual("dca", 6, 8)) is None
    assert step_vectors(make_residual("block", 6, 8, window=2)) is None


@pytest.mark.parametrize("name", ["hyper_connections", "mhc", "identity_hc"])
def test_parallel_streams_move_what_a_count_by_hand_says(name):
    """Forward: n streams and the output in, n streams and x out. Backward: the gradients of x and of n streams, n
    streams after the write and n before it, and the output in; gradients of n streams and of the output out."""
    counted = (3 + 1 + 3 + 1) + (1 + 3 + 3 + 3 + 1 + 3 + 1)
    assert step_vectors(make_residual(name, 6, 8, num_streams=3)) == 6 * counted
    assert step_vectors(make_residual("mhc_lite", 6, 8)) is None


def test_sums_of_other_kinds_move_what_a_count_by_hand_says():
    """One block of four sublayers. Phase 1: the embedding in, four outputs out; backward: the embedding, gradients of
    the four and one carried in, its gradient out. A merge of the block's first read: 2; backward 3.

    Split, two sums in turn: the second read has one sum, the next two have both. Forward: sums, phase 1's output in, h
    and x out, 4 with one, 5 with two, and 2 more where an output is added; backward: 2 more for each sum, and carried
    gradients. What ends the block is an addition.

    By a factor: one sum, which is made apart: 4 and 3 for each of three outputs, 4 for the first."""
    shared = (1 + 4) + (1 + 4 + 1 + 1) + (2 + 3)
    split = [(4, 2 + 1 + 1 + 1 + 1), (5, 2 + 2 + 2 + 2 + 1), (5 + 2, 2 + 2 + 2 + 2 + 1)]
    expected = shared + sum(forward + backward for forward, backward in split) + 3
    assert step_vectors(make_residual("block", 4, 8, block_size=4, summaries="split")) == expected
    factor = shared + 3 * (4 + 6) + 3 * (4 + 3) + 4
    assert step_vectors(make_residual("block", 4, 8, block_size=4, count_power=1.0)) == factor
    assert step_vectors(make_residual("block", 4, 8, block_size=4, block_scale=True)) == factor + 3
    assert step_vectors(make_residual("block", 4, 8, count_prior=1.0)) is None
    assert step_vectors(make_residual("full", 4, 8, embedding_key="static")) is None


def test_a_predicted_time_is_bytes_over_bandwidth():
    vector = 8192 * 7168 * torch.bfloat16.itemsize
    moved = traffic.seconds(traffic.read(9), tokens=8192, width=7168, itemsize=2, bandwidth=3e12)
    assert moved == pytest.approx(10 * vector / 3e12)


def test_the_tables_are_printed(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["traffic.py", "--bandwidth", "2e12"])
    traffic.main()
    shown = capsys.readouterr().out
    assert "flash-attn-res" in shown
    assert "2000 GB/s" in shown
