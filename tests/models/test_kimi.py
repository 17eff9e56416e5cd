"""Kimi Linear and Kimi K3 as their sizes are: converted, recorded, generated, planned (test_loop.py trains them)."""

import json

import pytest
import torch
from tiny import stir

from attnres.cli import main
from attnres.inspect import record
from attnres.models import build_plain, convert

pytestmark = pytest.mark.long


@pytest.mark.parametrize("size, block_size, sublayers", [("kimi-nano", 6, 54), ("k3-nano", 8, 26)])
def test_a_plain_one_converts_records_and_generates_with_its_caches(size, block_size, sublayers):
    model = convert(build_plain(size, vocab_size=300, max_positions=64), block_size=block_size).eval()
    assert model.conversion.relative_difference < 5e-6 and model.conversion.sublayers == sublayers
    stir(model.residual, 0.3, seed=1)
    ids = torch.randint(0, 300, (2, 20), generator=torch.Generator().manual_seed(0))
    generated = [model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=cached) for cached in (True, False)]
    assert torch.equal(*generated)
    with record(model) as trace:
        model(input_ids=ids, use_cache=False)
    assert len(trace.output_rms) == sublayers and all(value > 0 for value in trace.output_rms)


def test_the_papers_model_is_planned(capsys):
    flags = ["--gpus", "256", "--vocab-size", "163840", "--settings", "block_size=6", "--pp", "8", "--rows", "1"]
    main(["plan", "kimi-48b", *flags, "--gradient-checkpointing", "layer", "--json"])
    planned = json.loads(capsys.readouterr().out)
    (row,) = planned["layouts"]
    assert planned["parameters"] == pytest.approx(49.1e9, rel=0.01) and row["fits"]
    assert row["seconds"] < 1.04 * planned["standard"]["seconds"], "less than 4 %, as the paper says"
