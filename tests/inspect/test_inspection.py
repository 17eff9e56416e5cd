"""An inspection is what the model did on each token, summed while documents stream by."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from sample_mechanisms import LINEAR, WEIGHED, crossed

from attnres.errors import UserError
from attnres.inspect.inspection import Inspection
from attnres.inspect.inspector import inspect_model, show_example
from attnres.inspect.kinds import KINDS, kinds_of
from attnres.inspect.recording import record
from attnres.inspect.survey import encode, loss_change, survey
from attnres.residuals import RESIDUALS, make_residual


def look(model, tokenizer, documents, **options):
    return inspect_model(model, tokenizer, documents, **{"context": 16, **options})


@pytest.fixture(scope="module")
def model(make_model):
    return make_model("block")


@pytest.fixture(scope="module")
def one_by_one(model, tokenizer, documents):
    """(document, kind, weights of all reads, loss of the next token or NaN) of each token, a window at a time."""
    rows = []
    for number, text in enumerate(documents):
        encoded = encode(tokenizer, text)
        kinds = kinds_of(text, encoded.offsets, "prose")
        for start in range(0, len(encoded.ids), 16):
            ids = torch.tensor(encoded.ids[None, start : start + 16])
            with torch.no_grad(), record(model, tokens=True) as trace:
                logits = model(input_ids=ids, use_cache=False).logits[0]
            losses = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="none").tolist()
            weights = torch.cat(trace.token_weights, -1)[0].double().numpy()
            rows += zip([number] * ids.shape[1], kinds[start:], weights, [*losses, math.nan])
    return rows


def test_weights_and_loss_are_means_over_all_tokens(model, tokenizer, documents, one_by_one):
    inspection = look(model, tokenizer, iter(documents), batch_size=3)
    assert inspection.data["tokens"] == len(one_by_one) and inspection.data["documents"] == 5
    expected = np.mean([weights for _, _, weights, _ in one_by_one], 0)
    np.testing.assert_allclose(np.concatenate(inspection.routing["weights"]), expected, rtol=1e-4)
    losses = np.array([loss for *_, loss in one_by_one])
    assert inspection.losses["mean"] == pytest.approx(np.nanmean(losses), rel=1e-5)
    assert inspection.losses["tokens"] == np.isfinite(losses).sum()


def test_the_largest_share_is_of_any_token_and_the_high_one_of_nearly_all(model, tokenizer, documents, one_by_one):
    inspection = look(model, tokenizer, documents)
    weights = np.stack([weights for _, _, weights, _ in one_by_one])
    np.testing.assert_allclose(np.concatenate(inspection.routing["largest"]), weights.max(0), rtol=1e-4)
    high = np.quantile(weights, 0.99, axis=0, method="inverted_cdf")
    assert np.abs(np.concatenate(inspection.routing["high"]) - high).max() <= 1 / 500


def test_kinds_have_means_over_their_tokens_and_errors_over_documents(model, tokenizer, documents, one_by_one):
    inspection = look(model, tokenizer, documents, kind="prose", batch_size=2)
    assert inspection.kinds["names"][0] == "sentence start"
    for k, name in enumerate(inspection.kinds["names"]):
        chosen = [(d, w) for d, kind, w, _ in one_by_one if kind == KINDS["prose"].index(name)]
        assert inspection.kinds["tokens"][k] == len(chosen)
        mean = np.mean([w for _, w in chosen], 0)
        np.testing.assert_allclose(np.concatenate(inspection.kinds["weights"][k]), mean, rtol=1e-4)
        numbers = sorted({d for d, _ in chosen})
        parts = np.array([np.sum([w - mean for d, w in chosen if d == n], 0) for n in numbers])
        n = len(numbers)
        error = np.sqrt(n / (n - 1) * (parts**2).sum(0)) / len(chosen)
        np.testing.assert_allclose(np.concatenate(inspection.kinds["error"][k]), error, rtol=1e-3, atol=1e-6)


def test_batches_change_nothing(model, tokenizer, documents):
    one, many = (look(model, tokenizer, documents, batch_size=size) for size in (1, 64))
    np.testing.assert_allclose(np.concatenate(one.routing["weights"]), np.concatenate(many.routing["weights"]), 1e-4)
    assert one.losses["mean"] == pytest.approx(many.losses["mean"], rel=1e-5)
    assert one.kinds["tokens"] == many.kinds["tokens"]


@pytest.mark.long
def test_memory_does_not_grow_with_the_number_of_documents(model, tokenizer, documents):
    waiting = []

    def stream():
        for i in range(30):
            waiting.append(i)
            yield encode(tokenizer, documents[i % 5])

    ran = []
    survey(model, stream(), context=16, batch_size=2, on_tokens=lambda n: ran.append(len(waiting)))
    assert ran[0] < 20 and max(b - a for a, b in pairwise(ran)) < 20


@pytest.mark.quick("block", "full", "standard", "hyper_connections")
@pytest.mark.parametrize("residual", crossed())
def test_every_residual_is_inspected_as_far_as_it_goes(make_model, tokenizer, documents, residual, tmp_path):
    inspection = look(make_model(residual, scale=0.2), tokenizer, documents, example=documents[0])
    inspection.save(tmp_path / "inspection.json")
    assert Inspection.load(tmp_path / "inspection.json") == inspection
    assert len(inspection.output_rms) == 6 and len(inspection.input_rms) == len(make_residual(residual, 6, 8).layout())
    assert (inspection.routing is None) == (residual not in WEIGHED)
    assert (inspection.mixing is None) == (residual not in LINEAR)
    assert (inspection.sharpness is None) == (not RESIDUALS[residual].traits.has_query)
    if residual == "standard":
        assert inspection.distance == pytest.approx([i / 2 for i in range(7)])
        assert inspection.entropy["effective"] == pytest.approx(range(1, 8), rel=1e-4)


def test_an_example_shows_the_weights_of_its_own_tokens(model, tokenizer, documents):
    text = documents[1]
    shown = show_example(model, tokenizer, text, context=16, kind="prose")
    assert "".join(shown["tokens"]) == shown["text"] and text.startswith(shown["text"])
    ids = torch.tensor([shown["ids"]])
    assert len(shown["ids"]) == 16
    with torch.no_grad(), record(model, tokens=True) as trace:
        model(input_ids=ids, use_cache=False)
    assert shown["weights"] == [row[0].tolist() for row in trace.token_weights]
    assert shown["kinds"][0] == "sentence start" and shown["losses"][-1] is None


def test_a_beginning_of_text_token_is_in_front_of_every_window_and_counts_for_no_kind(model, tokenizer, documents):
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    backend = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
    token = tokenizer.bos_token
    backend.post_processor = TemplateProcessing(single=f"{token} $A", special_tokens=[(token, tokenizer.bos_token_id)])
    begun = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=token, eos_token=token)
    inspection = look(model, begun, documents)
    assert (
        sum(inspection.kinds["tokens"])
        == inspection.data["tokens"] - inspection.data["windows"]
        == inspection.losses["tokens"]
    )


def test_a_limit_stops_after_so_many_tokens(model, tokenizer, documents):
    assert look(model, tokenizer, documents, limit=37).data["tokens"] == 37


def test_running_twice_changes_no_loss(model, tokenizer, documents):
    first, second = (survey(model, [encode(tokenizer, t) for t in documents], context=16) for _ in range(2))
    change = loss_change(first, second)
    assert change.mean == change.error == 0.0 and change.items == 5


@pytest.mark.parametrize(
    ("documents", "message"),
    [([], "the text is empty"), ([""], "the text is empty"), (["e"], "the text is a single token")],
)
def test_too_little_text_is_one_sentence(model, tokenizer, documents, message):
    with pytest.raises(UserError, match=message):
        look(model, tokenizer, documents)


def test_a_tokenizer_that_fails_on_unknown_characters_is_one_sentence(model):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]")))
    with pytest.raises(UserError, match="the tokenizer cannot encode the text"):
        encode(bare, "漢")


def test_broken_weights_are_one_sentence(make_model, tokenizer, documents):
    model = make_model("full")
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(math.nan)
    with pytest.raises(UserError, match="NaN or infinite"):
        look(model, tokenizer, documents)


@pytest.mark.parametrize("text", ["{}", "[]", '{"format": 1}', "{"])
def test_a_file_that_is_no_inspection_is_one_sentence(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match=r"x\.json is"):
        Inspection.load(tmp_path / "x.json")


def test_an_example_is_of_a_model_that_drops_nothing(make_model, tokenizer, documents):
    model = make_model("block", scale=0.2).train()
    mlp = model.get_submodule("model.layers.0.mlp")
    mlp.register_forward_hook(lambda module, args, out: torch.nn.functional.dropout(out, 0.5, module.training))
    one, other = (show_example(model, tokenizer, documents[1], context=16, kind="prose") for _ in range(2))
    assert one == other and model.training
