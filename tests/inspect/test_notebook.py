"""What a notebook shows: short lines, whole HTML with nothing of the text's own code in it, data frames with names."""

import json
import math
import pickle
import re
import xml.etree.ElementTree as ET
from html import escape

import pytest
import torch

from attnres import UserError
from attnres.inspect import (
    Ablate,
    attribute,
    direct,
    effect,
    inspect_model,
    logit_lens,
    patch,
    predict,
    read_vectors,
    record,
)
from attnres.inspect.colours import DIVERGING, place_of_size
from attnres.inspect.notebook import heat
from attnres.models import load
from attnres.models.encoding import piece
from attnres.residuals import make_residual
from attnres.text import chance as in_digits
from attnres.text import visible

TEXT, OTHER = "The quick brown fox", "The lazy brown dog"


@pytest.fixture(scope="module")
def model(folder_of):
    return load(folder_of("block"))


@pytest.fixture(scope="module")
def shown(model, tokenizer):
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    with torch.no_grad(), record(model) as trace:
        model(input_ids=ids)
    other = tokenizer(OTHER)["input_ids"]
    count = min(ids.shape[1], len(other))
    return {
        "trace": trace,
        "effect": effect(model, TEXT, Ablate("embedding", reads="mlp")),
        "attribution": attribute(model, TEXT),
        "patching": patch(model, ids[:, :count], other[:count]),
        "lens": logit_lens(model, TEXT),
        "direct": direct(model, TEXT),
        "inspection": inspect_model(model, tokenizer, [TEXT + "<script>"], context=16, name="<script>", example=TEXT),
    }


def test_each_is_a_short_line_and_a_table(shown):
    for name, one in shown.items():
        page = one._repr_html_()
        tree = ET.fromstring(f"<body>{page}</body>")
        assert not list(tree.iter("script")), name
        assert list(tree.iter("td")) or name == "trace", name
        assert len(repr(one)) < 200 and "\n" not in repr(one), name


def test_a_trace_is_the_explorers_page_with_its_numbers(model, tokenizer):
    """In a frame of its own; a token that is clicked has its own row of numbers."""
    ids = tokenizer(TEXT)["input_ids"]
    with torch.no_grad(), record(model, tokens=True) as trace:
        model(input_ids=torch.tensor([ids]))
    page = ET.fromstring(f"<body>{trace._repr_html_()}</body>").find("iframe").get("srcdoc")
    data = json.loads(re.search(r'<script type="application/json" id="saved">(.*?)</script>', page, re.S)[1])
    (pane,) = data["panes"]
    assert [one["name"] for one in pane["reads"]] == trace.reads and len(pane["names"]) == len(ids)
    for mean, row, every, tokens in zip(
        trace.contribution, pane["contributions"], pane["every"]["contributions"], trace.token_contributions
    ):
        assert row == pytest.approx(mean, abs=1e-3)
        for token, numbers in enumerate(every):
            assert numbers == pytest.approx(tokens[0, token].tolist(), abs=1e-3)


def test_tokens_are_words_and_ids_where_no_tokenizer_is_known(shown, model, make_model, tokenizer):
    for name, token in (("lens", shown["lens"].top[-1][-1][0]), ("effect", shown["effect"].top[0]["id"])):
        word = visible(piece(tokenizer, token))
        assert shown[name].words(token) == word and f"<td>{escape(word)}</td>" in shown[name]._repr_html_(), name
    assert escape(f"“{shown['direct'].words(shown['direct'].target)}”") in shown["direct"]._repr_html_()
    plain = make_model()
    assert f"<td>{logit_lens(plain, [1, 2]).top[-1][-1][0]}</td>" in logit_lens(plain, [1, 2])._repr_html_()
    assert pickle.loads(pickle.dumps(shown["lens"])).top == shown["lens"].top


def test_each_is_saved_as_json(shown, model, tmp_path):
    shown = shown | {"prediction": predict(model, TEXT), "vectors": read_vectors(model, TEXT)}
    for name, one in shown.items():
        one.save(tmp_path / "one.json")
        values = json.loads((tmp_path / "one.json").read_text())
        assert values.pop("format") == 1
        assert values == json.loads(json.dumps(one.to_dict())) and len(values) > 1, name


def test_what_is_no_number_is_a_dash_on_nothings_colour():
    assert place_of_size(math.nan, 1.0) == 0.0
    assert [place_of_size(value, 4.0) for value in (1.0, -1.0, 9.0, -9.0)] == [0.5, -0.5, 1.0, -1.0]
    page = heat("title", make_residual("full", 2, 8).layout(), [[1.0], [math.nan, -0.5], [math.nan, 0.1, 0.5]])
    cells = re.findall(r"background:(#[0-9a-f]{6});[^>]*>([^<]*)</td>", page)
    assert [text for _, text in cells] == ["1.00", "–", "−0.50", "–", "0.10", "0.50"]
    assert cells[1][0] == cells[3][0] == DIVERGING[3] and cells[0][0] == DIVERGING[-1]
    assert len({colour for colour, _ in cells}) == 5, "the scale ends at the largest number"


def test_what_holds_vectors_is_a_short_line_too(model):
    assert repr(read_vectors(model, TEXT)).startswith("Vectors(7 reads, ")
    prediction = predict(model, TEXT)
    chance = prediction.log_probs[-1].exp().max()
    assert repr(prediction).endswith(f"with {in_digits(float(chance))})") and len(repr(prediction)) < 60


def test_frames_have_a_row_an_edge_with_its_names(shown):
    pytest.importorskip("pandas")
    trace, attribution = shown["trace"], shown["attribution"]
    table = trace.frame()
    assert list(table.columns) == ["read", "source", "weight", "contribution", "size", "rms", "cosine"]
    one = table[(table.read == "mlp 1") & (table.source == "block 1")].iloc[0]
    row = trace.sources[3].index("block 1")
    assert one.weight == trace.weights[3][row] and one.contribution == trace.contribution[3][row]
    assert len(attribution.frame()) == len(table) == len(shown["patching"].frame())
    assert set(shown["inspection"].frame().columns) >= {"weight", "contribution", "size", "high"}
    assert list(shown["effect"].frame().columns) == ["token", "id", "before", "after", "kl"]
    assert shown["lens"].frame().groupby("read").size().nunique() == 1
    assert shown["direct"].frame().part.iloc[-1] == "rest"


def test_letters_are_read_by_the_models_own_tokenizer(model, make_model, tokenizer):
    ids = tokenizer(TEXT)["input_ids"]
    change = Ablate("embedding", reads="output")
    assert effect(model, TEXT, change).loss_after == effect(model, ids, change).loss_after
    target = tokenizer.convert_ids_to_tokens(ids[-1]).replace("Ġ", " ")
    assert attribute(model, TEXT, position=-2, target=target).target == ids[-1]
    with pytest.raises(UserError, match=r"'a fox' is [0-9] tokens: give one"):
        attribute(model, TEXT, target="a fox")
    with pytest.raises(UserError, match="the model has no tokenizer beside it"):
        effect(make_model(), TEXT, change)
    with pytest.raises(UserError, match="'embedding' is no edit"):
        effect(model, TEXT, "embedding")
    with pytest.raises(UserError, match="the source is 3: expected a name"):
        effect(model, TEXT, Ablate(3))
    with pytest.raises(UserError, match="top is 0"):
        logit_lens(model, TEXT, top=0)
    with pytest.raises(UserError, match="a text is dict: expected letters or token ids"):
        effect(model, {"text": TEXT}, change)
