"""What the study of contributions measures: against a recording and an edit of one edge made by hand."""

import contribution
import numpy as np
import pytest
import torch
from tiny import SIZE

from attnres.inspect import Ablate, effect, record
from attnres.models import build

IDS = torch.randint(0, 50, (12,), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model():
    model = build(SIZE, "block", vocab_size=50, settings={"block_size": 2}).eval()
    with torch.no_grad():
        model.residual.query.normal_(generator=torch.Generator().manual_seed(1))
    return model


def test_numbers_are_those_of_the_recording_and_cuts_those_of_the_edit(model):
    numbers, cuts = contribution.measures_of(model, IDS), contribution.cuts_of(model, IDS, batch=4)
    with torch.no_grad(), record(model) as trace:
        model(input_ids=IDS[None], use_cache=False)
    for row, weights, sizes in zip(numbers, trace.weights, trace.size):
        np.testing.assert_allclose(row["weight"], weights, atol=1e-6)
        np.testing.assert_allclose(row["size"], sizes, rtol=1e-4)
        assert (row["turned"] > -1e-9).all()
    place = trace.sources[3].index("block 1")
    expected = effect(model, IDS, Ablate("block 1", reads="mlp 1")).difference
    assert cuts[3][place] == pytest.approx(expected, abs=1e-5)
    assert set(contribution.correlate(numbers, cuts)) == set(contribution.MEASURES)


def test_a_number_that_ranks_as_the_cost_does_correlates_wholly():
    cuts = [[1.0], [0.1, -0.2], [0.3, 0.05]]
    rows = [{name: np.abs(row) for name in contribution.MEASURES} for row in cuts]
    rows[1]["weight"], rows[2]["weight"] = np.array([0.2, 0.1]), np.array([0.05, 0.3])
    ranks = contribution.correlate(rows, cuts)
    assert ranks["contribution"] == pytest.approx(1) and ranks["weight"] < 0.5
