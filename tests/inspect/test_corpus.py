"""The top tokens of an edge: what one recording of each window says, in the same order, with the text around them."""

import json

import pytest
import torch

from attnres import UserError, cli
from attnres.inspect import record, search, source_names
from attnres.inspect.effects import read_vectors
from attnres.inspect.survey import encode

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


@pytest.mark.quick("weight-*")
@pytest.mark.parametrize(("by", "least"), [("contribution", False), ("contribution", True), ("weight", False)])
def test_the_top_tokens_are_those_of_the_vectors_themselves(model, tokenizer, documents, by, least):
    spent = []
    options = {"context": CONTEXT, "by": by, "least": least, "top": 7, "batch_size": 3, "on_tokens": spent.append}
    result = search(model, tokenizer, documents, "block 1", "mlp 1", **options)
    rows = by_hand(model, tokenizer, documents, "mlp 1", "block 1")
    key = 0 if by == "contribution" else 1
    best = sorted(rows, key=lambda row: row[key], reverse=not least)[:7]
    assert [(hit.document, hit.position) for hit in result.hits] == [row[2:] for row in best]
    for hit, row in zip(result.hits, best, strict=True):
        assert (hit.contribution, hit.weight) == pytest.approx(row[:2], abs=1e-5)
    assert result.tokens == len(rows) == sum(spent) and result.documents == len(documents)
    assert result.mean == pytest.approx(sum(row[key] for row in rows) / len(rows), abs=1e-5)


def test_a_token_stands_in_its_text(model, tokenizer, documents):
    for hit in search(model, tokenizer, documents, "embedding", "output", context=CONTEXT, top=50).hits:
        start, _ = encode(tokenizer, documents[hit.document]).offsets[hit.position]
        text = documents[hit.document]
        assert text[start : start + len(hit.token)] == hit.token
        assert text[:start].endswith(hit.before) and text[start + len(hit.token) :].startswith(hit.after)
        assert hit.window in text and hit.window[hit.at :].startswith(hit.token)


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
        ["search", str(folder_of("full")), "Attention_0@mlp1", "--text", text, "--top", "3", "--out", str(out)]
        + ["--no-progress"]
    )
    output = capsys.readouterr().out
    hits = json.loads(out.read_text())["hits"]
    assert "attention 0 is most of the read of mlp 1, by contribution" in output and len(hits) == 3
    assert all(f"[{hit['token']}]" in output for hit in hits)
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
