"""Edits of vectors, and patching between prompts: against hand-made passes, and against one another."""

import pytest
import torch

from attnres import UserError
from attnres.inspect import Ablate, Patch, Reweigh, Steer, intervene, patch, read_vectors
from attnres.inspect.patching import align

TEXT = "The quick brown fox jumps"
OTHER = "The lazy brown dog jumps"


@pytest.fixture(scope="module")
def models(make_model):
    return {name: make_model(name) for name in ("block", "full", "standard")}


def ids_of(tokenizer, text=TEXT):
    return torch.tensor([tokenizer(text)["input_ids"]])


def logits(model, ids, *edits):
    with torch.no_grad(), intervene(model, *edits):
        return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("residual", ["block", "full", "standard"])
def test_a_source_patched_with_itself_changes_nothing_and_with_zeros_is_knocked_out(models, tokenizer, residual):
    model, ids = models[residual], ids_of(tokenizer)
    vectors = read_vectors(model, ids)
    for read, sources in list(zip(vectors.layout, vectors.sources))[2:]:
        name = read.sources[-1].name
        same = logits(model, ids, Patch(name, sources[-1], reads=read.name))
        torch.testing.assert_close(same, logits(model, ids), rtol=1e-4, atol=1e-5)
        gone = logits(model, ids, Patch(name, torch.zeros(model.config.hidden_size), reads=read.name))
        expected = logits(model, ids, Ablate(name, reads=read.name, renormalise=False))
        torch.testing.assert_close(gone, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("residual", ["block", "full", "standard"])
def test_the_output_with_all_of_another_prompts_sources_and_weights_predicts_as_there(models, tokenizer, residual):
    model = models[residual]
    clean, corrupted = ids_of(tokenizer), ids_of(tokenizer, OTHER)
    shortest = min(clean.shape[1], corrupted.shape[1])
    clean, corrupted = clean[:, :shortest], corrupted[:, :shortest]
    vectors = read_vectors(model, clean)
    names = [source.name for source in vectors.layout[-1].sources]
    edits = [Patch(name, vector, reads="output") for name, vector in zip(names, vectors.sources[-1])]
    edits.append(Reweigh(lambda p, names: vectors.weights[-1], reads="output"))
    torch.testing.assert_close(logits(model, corrupted, *edits), logits(model, clean), rtol=1e-4, atol=1e-4)


def test_a_read_is_steered_as_far_as_a_source_times_its_weight(models, tokenizer):
    model, ids = models["block"], ids_of(tokenizer)
    vectors = read_vectors(model, ids)
    direction = torch.randn(model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    place = [source.name for source in vectors.layout[3].sources].index("embedding")
    weighted = vectors.weights[3][:, place, None] * direction
    one = logits(model, ids, Steer(direction, source="embedding", reads="mlp 1"))
    two = logits(model, ids, Steer(weighted, reads="mlp 1"))
    torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)
    assert (one - logits(model, ids)).abs().max() > 1e-3
    last = logits(model, ids, Steer(direction, reads="mlp 1", tokens=-1))
    torch.testing.assert_close(last[:, :-1], logits(model, ids)[:, :-1], rtol=1e-4, atol=1e-5)
    assert (last - logits(model, ids))[:, -1].abs().max() > 1e-3


def test_patching_all_edges_is_patching_each(models, tokenizer):
    model = models["block"]
    clean, corrupted = ids_of(tokenizer)[:, :6], ids_of(tokenizer, OTHER)[:, :6]
    result = patch(model, clean, corrupted, target=7, against=9, batch_size=5)
    vectors = read_vectors(model, clean)

    def measure(*edits, ids=corrupted):
        last = logits(model, ids, *edits)[0, -1]
        return (last[7] - last[9]).item()

    assert (result.clean, result.corrupted) == pytest.approx((measure(ids=clean), measure()), abs=1e-4)
    for read, sources, row in zip(vectors.layout, vectors.sources, result.patched):
        for source, vector, value in zip(read.sources, sources, row):
            assert value == pytest.approx(measure(Patch(source.name, vector, reads=read.name)), abs=1e-4)
    gap = result.clean - result.corrupted
    assert result.restored[3][0] == pytest.approx((result.patched[3][0] - result.corrupted) / gap)
    assert len(result.top(3)) == 3 and result.to_dict()["reads"][-1] == "output"


@pytest.mark.parametrize(
    ("clean", "corrupted", "partners"),
    [
        ([1, 2, 3], [4, 5, 6], [0, 1, 2]),
        ([1, 2, 3, 9], [1, 7, 2, 3, 9], [0, None, 1, 2, 3]),
        ([1, 7, 2, 3, 9], [1, 2, 3, 9], [0, 2, 3, 4]),
        ([1, 5, 6, 2, 9], [1, 7, 2, 8], [0, 2, 3, 4]),
        ([9], [1, 2, 9], [None, None, 0]),
    ],
)
def test_tokens_are_aligned_by_what_both_prompts_have(clean, corrupted, partners):
    assert align(clean, corrupted) == partners


def test_prompts_of_other_lengths_are_patched_where_they_are_aligned(models, tokenizer):
    """Each edge against a pass with its vectors put there by hand, with an edit in place and measured in the middle."""
    model, ids = models["block"], ids_of(tokenizer)[0].tolist()
    clean, corrupted = ids[:4] + ids[5:9], ids[:3] + [7, 8] + ids[3:9]
    aligned = align(clean, corrupted)
    place = len(corrupted) - 3
    assert None in aligned and aligned[place] is not None
    edit = Ablate("embedding", reads="mlp 1")
    result = patch(model, clean, corrupted, position=place, target=7, edits=[edit], batch_size=3)
    assert result.aligned == aligned[: place + 1] and result.position == place
    with intervene(model, edit):
        vectors = read_vectors(model, clean[: aligned[place] + 1])
    there = [t for t in range(place + 1) if aligned[t] is not None]
    for read, sources, row in zip(vectors.layout, vectors.sources, result.patched):
        for source, vector, value in zip(read.sources, sources, row):
            moved = torch.zeros(place + 1, vector.shape[-1])
            moved[there] = vector[[aligned[t] for t in there]]
            by_hand = Patch(source.name, moved, reads=read.name, tokens=there)
            last = logits(model, torch.tensor([corrupted[: place + 1]]), edit, by_hand)[0, -1]
            assert value == pytest.approx(last.log_softmax(-1)[7].item(), abs=1e-4)
    with pytest.raises(UserError, match=f"token {aligned.index(None)} of the corrupted prompt has no partner"):
        patch(model, clean, corrupted, position=aligned.index(None))


def test_what_cannot_be_patched_is_one_sentence(models, tokenizer):
    model, ids = models["block"], ids_of(tokenizer)
    width = model.config.hidden_size
    for edits, message in (
        ([Patch("mlp 9", torch.zeros(width))], "unknown source 'mlp 9'"),
        ([Patch("embedding", torch.zeros(3))], f"a vector of shape \\(3,\\) in a model of width {width}"),
        ([Patch("embedding", "much")], "the vector is str: expected numbers"),
        ([Steer(torch.zeros(2, width))], "vectors of shape .* for a forward pass of"),
    ):
        with pytest.raises(UserError, match=message):
            logits(model, ids, *edits)
    with pytest.raises(UserError, match="the same prediction"):
        patch(model, ids, ids)
    with pytest.raises(UserError, match="no read 'mlp 0' with a source 'block 9'"):
        read_vectors(model, ids).source("mlp 0", "block 9")


def test_reads_of_a_kind_are_named_by_it(models, tokenizer):
    """As on the command line: those without another source than the one that goes are left alone."""
    model, ids = models["block"], ids_of(tokenizer)
    names = [read.name for read in model.residual.layout() if read.kind == "attention" and len(read.sources) > 1]
    expected = logits(model, ids, Ablate("embedding", reads=names))
    assert torch.equal(logits(model, ids, Ablate("embedding", reads="attention")), expected)
    with pytest.raises(UserError, match="unknown read 'mpl'"):
        logits(model, ids, Ablate("embedding", reads="mpl"))
