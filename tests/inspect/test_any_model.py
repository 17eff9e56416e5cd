"""Functions of attnres.inspect on models not of Transformers: the tutorial's, an attached one, one of pictures."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import attnres
from attnres import UserError
from attnres.inspect import (
    Ablate,
    TextModel,
    attribute,
    circuit,
    corpus_effect,
    direct,
    effect,
    find_residual,
    from_trace,
    inspect_model,
    intervene,
    logit_lens,
    patch,
    predict,
    prune_report,
    read_vectors,
    record,
    search,
    source_names,
    token_attention,
)

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorials" / "your_model.md"
IDS = torch.randint(50, (9,), generator=torch.Generator().manual_seed(5))
OTHER = torch.randint(50, (9,), generator=torch.Generator().manual_seed(6))


def encoder(residual):
    """Return torch's own pre-norm layers with a depth stream."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, norm_first=True, batch_first=True)
    stack = nn.TransformerEncoder(layer, 2, nn.LayerNorm(16), enable_nested_tensor=False)
    attnres.attach(stack, residual)
    return stack


class Attached(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.encoder, self.head = nn.Embedding(50, 16), encoder("block"), nn.Linear(16, 50)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return (self.head(self.encoder(self.embedding(ids), mask=mask)),)


class TimeFirst(Attached):
    """Hands its hidden state on as (time, batch, width), as Megatron does."""

    def __init__(self):
        super().__init__()
        for layer in self.encoder.layers:
            layer.self_attn.batch_first = False

    def forward(self, ids):
        return self.head(self.encoder(self.embedding(ids).transpose(0, 1))).transpose(0, 1)


class Pictures(nn.Module):
    """Patches of pictures to classes."""

    def __init__(self):
        super().__init__()
        self.patches, self.encoder, self.head = nn.Conv2d(3, 16, 4, 4), encoder("full"), nn.Linear(16, 10)

    def forward(self, pictures):
        return self.head(self.encoder(self.patches(pictures).flatten(2).mT).mean(1))


def moved(model):
    """Return the model with a residual that has left its start values."""
    with torch.no_grad():
        for parameter in find_residual(model).parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return model.eval()


@pytest.fixture(scope="module", params=["block", "full", "standard", "attached"])
def model(request):
    torch.manual_seed(0)
    if request.param == "attached":
        return moved(Attached())
    blocks = re.findall(r"```python\n(.*?)```", TUTORIAL.read_text(encoding="utf-8"), re.S)
    names: dict = {}
    exec(next(one for one in blocks if "class Transformer" in one).split("\n\n\nmodel = ")[0], names)
    return moved(names["Transformer"](vocab=50, width=16, heads=2, layers=2, residual=request.param))


@torch.no_grad()
def logits_of(model, ids, *edits):
    with intervene(model, *edits):
        out = model(ids[None])
    return (out[0] if isinstance(out, tuple) else out)[0]


def test_what_it_predicts_and_what_an_edit_does(model):
    edit = Ablate("embedding", reads="output")
    before, after = (logits_of(model, IDS, *edits).log_softmax(-1) for edits in ((), (edit,)))
    torch.testing.assert_close(predict(model, IDS).log_probs, before)
    torch.testing.assert_close(predict(model.forward, IDS).log_probs, before)
    change = effect(model, IDS, edit)
    expected = (before - after)[:-1].gather(1, IDS[1:, None])[:, 0].mean().item()
    assert change.difference == pytest.approx(expected, abs=1e-5) and abs(expected) > 1e-4
    over = corpus_effect(model, [IDS, OTHER], edit)
    mean = (change.difference + effect(model, OTHER, edit).difference) / 2
    assert over.change.mean == pytest.approx(mean, abs=1e-5)


def test_what_its_reads_are_made_of(model):
    inspection = inspect_model(model, None, [IDS, OTHER.tolist()], context=16, example=IDS)
    assert inspection.data["tokens"] == 18 and inspection.example["tokens"] == [str(one) for one in IDS.tolist()]
    with torch.no_grad(), record(model) as trace:
        model(torch.stack([IDS, OTHER]))
    mine = from_trace(model, trace)
    for one, other in zip(inspection.routing["contribution"], mine.routing["contribution"], strict=True):
        assert one == pytest.approx(other, abs=1e-4) and sum(one) == pytest.approx(1, abs=1e-4)
    assert mine.reads[-1] == "output" and len(source_names(model)) == len(mine.reads)
    losses = [-predict(model, ids).log_probs[:-1].gather(1, ids[1:, None]).mean().item() for ids in (IDS, OTHER)]
    assert inspection.losses["mean"] == pytest.approx(sum(losses) / 2, abs=1e-4)
    if inspection.traits.by_token:
        assert prune_report(inspection).edges
        with pytest.raises(UserError, match="inspect_model"):
            prune_report(mine)


def test_edges_are_scored_and_patched_as_a_pass_by_hand_does(model):
    base = logits_of(model, IDS)[-1].log_softmax(-1)
    scores, names = attribute(model, IDS), source_names(model)
    for read in range(1, len(names)):
        cut = logits_of(model, IDS, Ablate(names[read][-1], reads=read))[-1].log_softmax(-1)
        assert scores.knockout[read][-1] == pytest.approx((cut - base)[scores.target].item(), abs=1e-4)
    torch.testing.assert_close(read_vectors(model, IDS).log_probs, base, atol=1e-5, rtol=1e-4)
    links = circuit(model, IDS, most=3)
    assert not links.attends and links.before == pytest.approx(base[links.target].item(), abs=1e-4)
    other = torch.cat([OTHER[:8], IDS[8:]])
    result = patch(model, IDS, other, target=7)
    edit = attnres.inspect.Patch(names[2][0], read_vectors(model, IDS).sources[2][0], reads=2)
    assert result.patched[2][0] == pytest.approx(logits_of(model, other, edit)[-1].log_softmax(-1)[7].item(), abs=1e-4)


def test_tokens_at_which_a_source_is_most(model):
    found = search(model, None, [IDS, OTHER], source_names(model)[-1][0], "output", context=16, top=3)
    with torch.no_grad(), record(model, tokens=True) as trace:
        model(torch.stack([IDS, OTHER]))
    best = trace.token_contributions[-1][..., 0].flatten()
    assert found.hits and len({(hit.document, hit.token, hit.position) for hit in found.hits}) == len(found.hits)
    for hit in found.hits:  # one a context, so that the third largest of all may stand beside the first
        place = 9 * hit.document + hit.position
        assert hit.contribution == pytest.approx(best[place].item(), abs=1e-5)
        assert hit.token.strip() == str(torch.cat([IDS, OTHER])[place].item())
    assert found.hits[0].contribution == pytest.approx(best.max().item(), abs=1e-5)


def test_reads_in_words(model):
    lens, logits = logit_lens(model, IDS, top=2), logits_of(model, IDS)
    assert [row[0] for row in lens.top[-1]] == logits.argmax(-1).tolist()
    assert max(lens.divergence[-1]) < 1e-5 < max(lens.divergence[0])
    assert direct(model, IDS, target=7).logit == pytest.approx(logits[-1, 7].item(), abs=1e-4)
    given = TextModel(model, head=lambda x: model.head(x))
    assert logit_lens(given, IDS, top=2).top == lens.top
    with pytest.raises(UserError, match="no linear layer"):
        direct(given, IDS)


def test_what_cannot_work_says_why(model):
    with pytest.raises(UserError, match="no model of Transformers"):
        token_attention(model, IDS)
    for act in (lambda: predict(model, "letters"), lambda: inspect_model(model, None, ["letters"], context=8)):
        with pytest.raises(UserError, match="letters"):
            act()
    with pytest.raises(UserError, match="Tok: expected one of Transformers"):
        inspect_model(model, type("Tok", (), {})(), ["letters"], context=8)
    with pytest.raises(UserError, match="token id 50"):
        predict(model, [50])
    with pytest.raises(UserError, match=r"TextModel\(module, function\)"):
        effect(lambda ids: model(ids), IDS, Ablate("embedding"))
    with pytest.raises(UserError, match="expected logits, one row a token"):
        predict(TextModel(model, lambda ids: ids), IDS)
    with pytest.raises(UserError, match="no linear layer"):
        logit_lens(TextModel(model, lambda ids: 2 * logits_of_batch(model, ids)), IDS)
    with pytest.raises(UserError, match="Linear has no residual"):
        TextModel(nn.Linear(2, 2))


def logits_of_batch(model, ids):
    out = model(ids)
    return out[0] if isinstance(out, tuple) else out


def test_letters_are_read_by_a_tokenizer_that_is_given(tokenizer):
    model = moved(Attached())
    model.embedding, model.head = nn.Embedding(len(tokenizer), 16), nn.Linear(16, len(tokenizer))
    ids, named = tokenizer("The quick fox")["input_ids"], TextModel(model, tokenizer=tokenizer.backend_tokenizer)
    torch.testing.assert_close(predict(named, "The quick fox").log_probs, predict(model, ids).log_probs)
    inspection = inspect_model(model, tokenizer, ["The quick fox"], context=16, example="The quick fox")
    assert "".join(inspection.example["tokens"]) == "The quick fox"


def test_a_model_of_pictures_is_recorded_and_edited():
    torch.manual_seed(0)
    model, pictures = moved(Pictures()), torch.randn(2, 3, 16, 16)
    with torch.no_grad(), record(model, tokens=True) as trace:
        seen = model(pictures)
    inspection = from_trace(model, trace)
    assert inspection.data["tokens"] == 32
    assert all(sum(row) == pytest.approx(1, abs=1e-4) for row in inspection.routing["contribution"])
    with torch.no_grad(), intervene(model, Ablate("embedding", reads="output")):
        assert not torch.allclose(model(pictures), seen, atol=1e-3)
    with torch.no_grad():
        assert torch.equal(model(pictures), seen)
    for function in (predict, logit_lens, direct, attribute, read_vectors):
        with pytest.raises(UserError, match=r"Pictures takes no token ids.*record, intervene and from_trace"):
            function(model, [1, 2, 3])


def test_a_hidden_state_of_time_before_batch_is_refused():
    with pytest.raises(UserError, match=r"\(2, 1, 16\) for ids \(1, 2\).*record"):
        predict(TimeFirst(), [1, 2, 3])


def test_no_weight_is_ever_infinite():
    residual = attnres.make_residual("full", 2, 8)
    state = residual.start(torch.randn(1, 3, 8))
    with record(residual) as trace, pytest.raises(UserError, match="call `start`"):
        residual.read(state, 0, attnres.Norm())
    assert trace.weights == [[], [], []]
