"""The report finds the edges that were planted, and taking them out changes what it says it changes."""

import numpy as np
import pytest
import torch

from attnres.errors import UserError
from attnres.inspect.edits import Reweigh, intervene
from attnres.inspect.inspector import inspect_model
from attnres.inspect.prune import prune_report
from attnres.inspect.survey import encode, loss_change, survey


def look(model, tokenizer, documents):
    return inspect_model(model, tokenizer, documents, context=16)


@pytest.fixture(scope="module")
def model(make_model):
    return make_model("full", scale=0.1)


def test_an_edge_that_is_hardly_read_is_found_and_others_are_not(model, tokenizer, documents):
    row = [0.499, 0.002, 0.499]
    with intervene(model, Reweigh(lambda p, names: row, reads="attention 1")):
        report = prune_report(look(model, tokenizer, documents), 0.01)
    edges = report.below("mean")
    assert [(edge.read, edge.source) for edge in edges] == [("attention 1", "attention 0")]
    assert edges == report.below("high") and edges[0].mean == pytest.approx(0.002, rel=1e-3)
    assert len(report.edges) == 2 + 3 + 4 + 5 + 6 + 7, "a read of one source has no choice"
    assert report.traffic("mean") == pytest.approx(1 / 27)
    assert report.weight("mean") == pytest.approx(0.002 / 6, rel=1e-3)
    use = {use.source: use for use in report.sources}["attention 0"]
    assert (use.reads, use.below_mean, use.below_high) == (6, 1, 1)


def test_a_source_read_by_one_token_in_a_hundred_is_light_on_average_only(model, tokenizer):
    text = "the quick brown fox jumps over a lazy dog"
    length = len(encode(tokenizer, text).ids)
    rows = torch.tensor([[0.999, 0.001]]).repeat(length, 1)
    rows[2] = torch.tensor([0.5, 0.5])
    with intervene(model, Reweigh(lambda p, names: rows, reads="mlp 0")):
        inspection = inspect_model(model, tokenizer, [text], context=32)
    report = prune_report(inspection, threshold=0.1)
    edge = next(edge for edge in report.edges if (edge.read, edge.source) == ("mlp 0", "attention 0"))
    assert edge in report.below("mean") and edge not in report.below("high")
    assert edge.largest == pytest.approx(0.5)


def test_parts_are_by_the_length_of_the_sources(model, tokenizer, documents):
    inspection = look(model, tokenizer, documents)
    report = prune_report(inspection)
    index = inspection.reads.index("mlp 1")
    lengths = np.array(inspection.routing["weights"][index]) * np.array(inspection.source_rms[index])
    parts = [edge.part for edge in report.edges if edge.read == "mlp 1"]
    assert parts == pytest.approx(lengths / lengths.sum(), rel=1e-5)


def test_taking_the_edges_out_leaves_no_weight_on_them(model, tokenizer, documents):
    report = prune_report(look(model, tokenizer, documents), 0.2)
    gone = {(edge.read, edge.source) for edge in report.below("mean")}
    assert gone
    with intervene(model, *report.edits("mean")):
        after = look(model, tokenizer, documents)
    for read, sources, weights in zip(after.reads, after.routing["sources"], after.routing["weights"]):
        for source, weight in zip(sources, weights):
            assert (weight == 0.0) == ((read, source) in gone)


def test_removing_what_has_no_weight_changes_no_loss(make_model, tokenizer, documents):
    model = make_model("block", scale=0.0)
    encoded = [encode(tokenizer, text) for text in documents]
    with torch.no_grad():  # a query along the embedding's key leaves the others nothing
        model.residual.query[2] = 1e4 * torch.ones(32)
        model.model.embed_tokens.weight.copy_(torch.rand(300, 32) + 1.0)
    report = prune_report(look(model, tokenizer, documents), 1e-6)
    assert {edge.read for edge in report.below("mean")} == {"attention 1"}
    plain = survey(model, encoded, context=16)
    with intervene(model, *report.edits("mean")):
        pruned = survey(model, encoded, context=16)
    assert loss_change(plain, pruned).mean == pytest.approx(0.0, abs=1e-6)


def test_the_record_is_json(model, tokenizer, documents):
    import json

    record = prune_report(look(model, tokenizer, documents), 0.2).to_dict()
    assert json.loads(json.dumps(record, allow_nan=False)) == record


@pytest.mark.parametrize("residual", ["standard", "rescaled", "deepnorm"])
def test_residuals_that_learn_no_weights_have_nothing_to_prune(make_model, tokenizer, documents, residual):
    inspection = look(make_model(residual), tokenizer, documents)
    with pytest.raises(UserError, match=f"residual '{residual}' learns no weights"):
        prune_report(inspection)


@pytest.mark.parametrize("threshold", [0.0, 1.0, -1.0, float("nan")])
def test_thresholds_that_cannot_be_are_refused(model, tokenizer, documents, threshold):
    with pytest.raises(UserError, match="expected a weight between 0 and 1"):
        prune_report(look(model, tokenizer, documents), threshold)


def test_a_null_source_is_no_edge_since_nothing_is_loaded_for_it(make_model, tokenizer, documents):
    report = prune_report(look(make_model("full", scale=0.1, null_source=True), tokenizer, documents), threshold=0.9)
    assert len(report.edges) == 2 + 3 + 4 + 5 + 6 + 7
    assert "null" not in [use.source for use in report.sources]
