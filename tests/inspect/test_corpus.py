"""The top tokens of an edge: what one recording of each window says, in the same order, with the text around them."""

import json

import pytest
import torch

from attnres import UserError, cli
from attnres.data.sources import open_source
from attnres.inspect import record, search, source_names
from attnres.inspect.corpus import APART
from attnres.inspect.effects import read_vectors
from attnres.inspect.survey import encode
from attnres.text import visible

CONTEXT = 16


@pytest.fixture(scope="module")
def model(make_model):
    return make_model("block")


def by_hand(model, tokenizer, documents, read, source):
    """(contribution, weight, document, position) of every token, from the vectors of each window."""
    rows = []
    for number, text in enumerate(documents):
        ids = encode(tokenizer, text).ids
        for start in range(0, len(ids), CONTEXT):
            window = read_vectors(model, ids[start : start + CONTEXT])
            index = [one.name for one in window.layout].index(read)
            place = source_names(model)[index].index(source)
            weight, h = window.weights[index][:, place], window.reads[index]
            term = weight[:, None] * window.sources[index][place]
            share = (term * h).sum(-1) / h.square().sum(-1)
            rows += [(share[t].item(), weight[t].item(), number, start + t) for t in range(len(share))]
    return rows


def words_at(tokenizer, documents, number, position):
    """The ids of a token and the two on either side within its window."""
    ids, start = encode(tokenizer, documents[number]).ids, position // CONTEXT * CONTEXT
    return tuple(ids[max(start, position - 2) : min(start + CONTEXT, position + 3)])


@pytest.mark.quick("weight-*")
@pytest.mark.parametrize(("by", "least"), [("contribution", False), ("contribution", True), ("weight", False)])
def test_the_top_tokens_are_those_of_the_vectors_themselves(model, tokenizer, documents, by, least):
    spent = []
    options = {"context": CONTEXT, "by": by, "least": least, "top": 7, "batch_size": 3, "on_tokens": spent.append}
    result = search(model, tokenizer, documents, "block 1", "mlp 1", **options)
    rows = by_hand(model, tokenizer, documents, "mlp 1", "block 1")
    key = 0 if by == "contribution" else 1
    best = []
    for row in sorted(rows, key=lambda row: row[key], reverse=not least):  # one of each window, whose length is 16
        words = words_at(tokenizer, documents, *row[2:])
        close = any(
            row[2] == one[2] and row[3] // CONTEXT == one[3] // CONTEXT and abs(row[3] - one[3]) <= APART
            for one in best
        )
        if not close and words not in [words_at(tokenizer, documents, *one[2:]) for one in best]:
            best.append(row)
    best = best[:7]
    assert [(hit.document, hit.position) for hit in result.hits] == [row[2:] for row in best]
    ordered = sorted(row[key] for row in rows)
    for hit in result.hits:
        assert hit.quantile == pytest.approx(sum(value <= getattr(hit, by) + 1e-6 for value in ordered) / len(rows))
        assert hit.around[hit.here] == (hit.token, pytest.approx(getattr(hit, by), abs=1e-5))
    assert result.quantiles["0.5"] == pytest.approx(ordered[-(-len(rows) // 2) - 1], abs=1e-5)
    assert result.quantiles["1"] == pytest.approx(ordered[-1], abs=1e-5)
    shown = [getattr(sample, by) for sample in result.samples]
    assert shown == sorted(shown, reverse=True) and len(shown) == 6
    assert shown[3] == pytest.approx(result.quantiles["0.5"], abs=1e-5), "all tokens are in the draw"
    for hit, row in zip(result.hits, best, strict=True):
        assert (hit.contribution, hit.weight) == pytest.approx(row[:2], abs=1e-5)
    assert result.tokens == len(rows) == sum(spent) and result.documents == len(documents)
    assert [hit.name for hit in result.hits] == [f"document {hit.document}" for hit in result.hits]
    assert result.mean == pytest.approx(sum(row[key] for row in rows) / len(rows), abs=1e-5)


def test_a_token_stands_in_its_text(model, tokenizer, documents):
    for hit in search(model, tokenizer, documents, "embedding", "output", context=CONTEXT, top=50).hits:
        start, _ = encode(tokenizer, documents[hit.document]).offsets[hit.position]
        text = documents[hit.document]
        assert text[start : start + len(hit.token)] == hit.token
        assert text[:start].endswith(hit.before) and text[start + len(hit.token) :].startswith(hit.after)
        assert hit.window in text and hit.window[hit.at :].startswith(hit.token)


def test_a_text_of_many_files_names_them_and_no_context_comes_twice(model, tokenizer, tmp_path):
    """The same words in every file are one hit, and the table names the file and shows each token's number."""
    for name in ("a.py", "b.py", "sub/c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(
            "the quick brown fox jumps over a lazy dog" + (" while seven" if name == "b.py" else "")
        )
    texts = open_source(str(tmp_path)).read
    result = search(model, tokenizer, texts(), "embedding", "output", context=CONTEXT, top=50)
    assert len({(hit.token, tuple(hit.around)) for hit in result.hits}) == len(result.hits)
    assert {hit.name for hit in search(model, tokenizer, texts(), "embedding", "output", context=CONTEXT).samples} <= {
        *("a.py", "b.py", "sub/c.py")
    }
    html = result._repr_html_()
    assert result.hits[0].name in html and html.count("outline:1px") == len(result.hits) + len(result.samples)
    assert html.count("background:#") == sum(len(hit.around) for hit in (*result.hits, *result.samples))


def test_a_limit_stops_and_a_recording_after_it_is_free(model, tokenizer, documents):
    assert search(model, tokenizer, documents, "embedding", -1, context=CONTEXT, limit=20).tokens == 20
    with record(model) as trace, torch.no_grad():
        model(input_ids=torch.tensor([[1, 2]]))
    assert trace.tokens == 2


@pytest.mark.parametrize(
    ("source", "read", "options", "words"),
    [
        ("embeding", "mlp 1", {}, "did you mean 'embedding'"),
        ("embedding", "mlp", {}, "'mlp' names 3 reads: name one, such as 'mlp 0'"),
        ("embedding", "mpl 1", {}, "did you mean 'mlp 1'"),
        ("embedding", "mlp 1", {"context": 0}, "context is 0"),
        ("embedding", "mlp 1", {"top": 0}, "top is 0: expected 1 or more"),
        ("embedding", "mlp 1", {"by": "size"}, "unknown number to search by 'size'"),
    ],
)
def test_what_is_not_there_is_one_sentence(model, tokenizer, source, read, options, words):
    with pytest.raises(UserError, match=words):
        search(model, tokenizer, ["some text"], source, read, **({"context": CONTEXT} | options))
    with pytest.raises(UserError, match="the documents are empty"):
        search(model, tokenizer, ["", ""], "embedding", "output", context=CONTEXT)
    with pytest.raises(UserError, match="documents is one text: expected several"):
        search(model, tokenizer, "some text", "embedding", "output", context=CONTEXT)


def test_the_command_prints_and_writes_them(folder_of, tmp_path, capsys):
    out = tmp_path / "hits.json"
    text = "the quick brown fox jumps over a lazy dog while seven wizards box up jugs"
    cli.main(
        ["search", str(folder_of("full")), "Attention_0@mlp1", "--text", text, "--top", "2", "--out", str(out)]
        + ["--no-progress"]
    )
    output = capsys.readouterr().out
    hits = json.loads(out.read_text())["hits"]
    assert "attention 0 is most of the read of mlp 1, by contribution" in output and len(hits) == 2
    assert all(f"[{visible(hit['token'])}]" in output for hit in hits)
    for words, message in [("attention 0", "expected SOURCE@READ"), ("attention 9@mlp 1", "unknown source of mlp 1")]:
        with pytest.raises(SystemExit) as left:
            cli.main(["search", str(folder_of("full")), words, "--text", text])
        assert left.value.code == 2 and message in capsys.readouterr().err


def test_a_search_replaces_no_file_of_another_kind(folder_of, tmp_path, capsys):
    config, folder = tmp_path / "config.json", tmp_path / "folder"
    config.write_text('{"steps": 1}')
    folder.mkdir()
    for out, said in ((config, "no earlier result of this command"), (folder, "is a folder")):
        with pytest.raises(SystemExit) as left:
            cli.main(["search", str(folder_of("full")), "attention_0@mlp1", "--text", "a b", "--out", str(out)])
        assert left.value.code == 2 and said in capsys.readouterr().err
    assert config.read_text() == '{"steps": 1}'
