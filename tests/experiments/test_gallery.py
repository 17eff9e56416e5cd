"""The five questions: measured by what the interpretability functions say of the same documents, told by intervals."""

import gallery
import numpy as np
import pytest
import torch
from tiny import SIZE, stir

from attnres.inspect import Ablate, effect, record
from attnres.models import build


@pytest.fixture(scope="module")
def looked():
    model = build(SIZE, "block", vocab_size=60, max_positions=32, settings={"block_size": 2}).eval()
    stir(model.residual, 0.5, seed=1)
    draw = torch.Generator().manual_seed(0)
    documents = [torch.randint(60, (12,), generator=draw) for _ in range(3)]
    return model, documents, gallery.look(model, documents)


def test_every_number_is_what_one_call_says(looked):
    model, documents, seen = looked
    for d, ids in enumerate(documents):
        with record(model) as trace, torch.no_grad():
            model(input_ids=ids[None])
        for row, values in zip(seen.contributions, trace.contribution, strict=True):
            assert row[d] == pytest.approx(np.array(values), abs=1e-5)
        for r, s in (next(iter(seen.without)), max(seen.without)):
            read = seen.layout[r]
            one = effect(model, ids, Ablate(read.sources[s].name, reads=read.name))
            assert seen.losses[d] == pytest.approx(np.mean(one.loss_before), abs=1e-5)
            assert seen.without[r, s][d] == pytest.approx(np.mean(one.loss_after), abs=1e-5)


def test_an_answer_holds_where_its_interval_does(looked):
    _, _, seen = looked
    text = gallery.page(seen, "example", "a text", 12)
    assert [line[4] for line in text.splitlines() if line.startswith("### ")] == list("12345")
    assert gallery.MARK.search(gallery.PAGE.read_text("utf-8")), "the page has a place for them"
    assert text.count("One click:") == text.count("One line:") == 5 and text.count("±") > 10
    reads = [r for r, read in enumerate(seen.layout) if read.kind == "mlp" and len(read.sources) > 1]

    def told(early, late):
        rows = [row.copy() for row in seen.contributions]
        for r in reads:
            share = early if seen.layout[r].number < seen.layers / 3 else late
            rows[r][:, 0] = 1 / rows[r].shape[1] + share + 0.001 * np.arange(3)
        changed = gallery.Looked(seen.layout, rows, seen.weights, seen.losses, seen.without, seen.nowhere)
        return gallery.answer(changed, "mlp", True, "embedding")[0]

    assert told(0.3, 0.1).startswith("**Both intervals exclude 0, as the motif says.**")
    assert told(0.1, 0.3).startswith("**An interval excludes 0, against the motif.**")
    assert told(-0.1, -0.3).startswith("**An interval excludes 0, against the motif.**")
    assert told(0.001, 0.001).startswith("**An interval includes 0.**")
