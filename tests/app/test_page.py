"""The page without its server: it shows what the model did, and says in one sentence what is wrong."""

import json
import shutil
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from attnres.app.explorer import KEPT, Opened, choose_threads, find_demo, open_models
from attnres.app.page import Page
from attnres.app.state import HEAVIEST, LOSS, MAX_CHARACTERS, Edge, View, decode, encode
from attnres.errors import UserError
from attnres.inspect.edits import KnockOut
from attnres.inspect.effects import effect

CONTEXT = 512  # of the models in conftest.py
TEXT = "def read(rows, name):\n    return rows[name]\n"


def edge(model, read, source):
    return {"model": model, "read": read, "source": source}


def test_a_reading_is_what_the_model_computes(block):
    reading = block.read(TEXT)
    ids = torch.tensor([reading.ids])
    with torch.no_grad():
        out = block.model(input_ids=ids, output_routing_weights=True, use_cache=False)
    for mine, theirs in zip(reading.weights, out.routing_weights, strict=True):
        np.testing.assert_allclose(mine, theirs[0].numpy(), atol=1e-6)
    expected = torch.nn.functional.cross_entropy(out.logits[0, :-1], ids[0, 1:], reduction="none")
    np.testing.assert_allclose(reading.losses, expected.numpy(), rtol=1e-5)
    assert "".join(reading.pieces) == TEXT
    assert reading.sources == block.sources and reading.reads == block.reads


@pytest.mark.parametrize("model", ["block", "full", "standard"])
def test_a_knock_out_is_that_of_the_library(folders, model):
    opened = Opened(folders[model])
    last = len(opened.reads) - 1
    knocked = opened.knock_out(TEXT, frozenset({(last, 0), (2, 1)}))
    names = [opened.sources[last][0], opened.sources[2][1]]
    edits = [KnockOut(names[0], reads=last), KnockOut(names[1], reads=2)]
    found = effect(opened.model, torch.tensor([opened.read(TEXT).ids]), edits)
    np.testing.assert_allclose(knocked.losses, found.loss_after, rtol=1e-5)


def test_clicks_knock_out_and_bring_back(page):
    view = View(TEXT, (0, 1))
    once = page.click(view, edge(0, 3, 0))
    twice = page.click(once, edge(1, 6, 2))
    assert twice.edges == {Edge(0, 3, 0), Edge(1, 6, 2)}
    assert page.click(page.click(twice, edge(0, 3, 0)), edge(1, 6, 2)) == view
    assert page.reset(twice) == view
    panes = page.show(twice).panes
    assert all("without 1 edge" in pane for pane in panes)
    assert "without" not in page.show(view).panes[0]


@pytest.mark.parametrize(
    "event",
    [
        None,
        [],
        {},
        {"token": "0"},
        {"token": -1},
        {"token": True},
        edge(0, 99, 0),
        edge(0, 0, 1),
        edge(2, 0, 0),
        edge(0, 1.0, 0),
    ],
)
def test_clicks_on_what_is_not_there_are_refused(page, event):
    with pytest.raises(UserError, match="again"):
        page.click(View(TEXT), event)


def test_a_link_restores_what_was_shown(page):
    view = page.click(page.click(page.type(View(models=(0, 1)), TEXT), {"token": 3}), edge(1, 6, 0))
    view = page.colour(view, 2, "embedding")
    shown = page.show(view)
    again, said = page.begin(dict(pair.split("=", 1) for pair in shown.query.split("&")))
    assert (again, said) == (view, "")
    assert page.show(again).panes == shown.panes
    assert page.begin({"e": "x"})[1].startswith("this link is damaged")
    opening = page.begin({})[0]
    reading = page.models[0].read(opening.text)
    kinds = [len(set(abs(weights).argmax(1))) for weights in reading.weights]
    assert kinds[-1 if opening.read is None else opening.read] > 1 or max(kinds) == 1
    assert opening.text and page.begin({"m": "1"})[0].models == (1,)


def test_edges_of_another_model_are_left_out_with_a_word(page):
    shown = page.show(decode({"e": "0.99.0_0.3.0"}, 2))
    assert shown.view.edges == {Edge(0, 3, 0)} and "left out" in shown.message


def test_what_colours_tokens_follows_the_model(page):
    shown = page.show(page.colour(View(TEXT), 99, "mlp 7"))
    assert shown.view.read is None and shown.view.source == HEAVIEST
    assert shown.reads[0] == ("output", -1) and len(shown.reads) == 7
    values = [value for _, value in page.show(page.colour(View(TEXT), 1, LOSS)).sources]
    assert values == [HEAVIEST, "embedding", "partial", LOSS]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "There is no text"),
        (" \n\t", "There is no text"),
        ("x" * (MAX_CHARACTERS + 1), f"this page takes {MAX_CHARACTERS:,}"),
        ("Z%q" * (CONTEXT // 2), f"takes {CONTEXT:,} here: shorten it"),
    ],
)
def test_a_text_that_cannot_be_read_is_one_sentence_and_the_page_goes_on(page, text, words):
    shown = page.show(page.type(View(models=(0, 1)), text))
    assert words in shown.panes[0] and 'class="error"' in shown.panes[0]
    assert "data-token" in page.show(page.type(shown.view, TEXT)).panes[0]


def test_a_plain_sum_has_no_heaviest_source_and_can_be_edited(folders):
    page = Page([Opened(folders["standard"])])
    pane = page.show(View(TEXT)).panes[0]
    assert (
        "All sources of this read weigh the same" in pane
        and "the same for every token" in pane
        and "Pseudo-queries" not in pane
    )
    assert "without 1 edge" in page.show(page.click(View(TEXT), edge(0, 6, 3))).panes[0]


def test_bytes_that_are_no_character_are_told_apart(block):
    reading = block.read("Grüße 漢")
    assert "\\xc3" in "".join(reading.pieces) and "\ufffd" not in "".join(reading.pieces)
    plain = "".join(reading.pieces).encode("latin-1").decode("unicode_escape").encode("latin-1").decode()
    assert plain == "Grüße 漢"
    assert block.read("a\ufffd").pieces[-1] in ("\ufffd", "\\xbd")


def test_as_many_candidates_before_a_knock_out_as_after(page):
    reading, effect = page.models[0].read(TEXT), page.models[0].knock_out(TEXT, frozenset({(6, 0)}))
    for token in range(5):
        assert len(page.models[0].top(reading, None, token)) == 8
        both = page.models[0].top(reading, effect, token)
        assert len({c.piece for c in both}) == len(both) == 8
        assert {float(effect.log_probs[token].exp().max())} <= {c.after for c in both}


def test_one_token_has_a_distribution_and_no_loss(page):
    pane = page.show(page.type(View(), "d")).panes[0]
    assert "One token" in pane and "Next token" in pane and "nats per token" not in pane
    assert "data-token" in page.show(page.click(page.type(View(), "d"), edge(0, 6, 0))).panes[0]


def test_characters_never_seen_are_read_as_bytes_or_said(page, block, monkeypatch):
    assert "never seen" not in page.show(page.type(View(), "☃ 日本 🎉")).panes[0]
    monkeypatch.setattr(block.tokenizer, "_unk_token", "d", raising=False)
    blind = block.tokenizer.decode
    monkeypatch.setattr(block.tokenizer, "decode", lambda ids, **how: blind(ids, **how).replace("☃", ""))
    assert "has never seen some characters of this text (☃)" in page.show(page.type(View(), "snow ☃!")).panes[0]


def test_half_a_character_from_the_browser_is_none(page):
    shown = page.show(page.type(View(), "a\ud83d b"))
    assert "data-token" in shown.panes[0] and decode(dict(p.split("=", 1) for p in shown.query.split("&")), 2).text


def test_models_with_different_tokenizers_are_shown_with_a_warning(folders, block):
    page = Page([block, Opened(folders["other"])])
    shown = page.show(View(TEXT, (0, 1)))
    assert "different tokenizers" in shown.message and all("data-token" in pane for pane in shown.panes)
    assert page.show(View(TEXT, (1,))).message == ""


def test_one_model_can_be_shown_alone(page):
    assert [value for _, value in page.choices] == ["0", "1", "0.1"]
    assert len(page.show(page.choose(View(TEXT, (0, 1)), "1")).panes) == 1
    with pytest.raises(UserError, match="not one of those"):
        page.choose(View(TEXT), "2")


def test_the_export_holds_numbers_that_json_has(page):
    view = page.click(View(TEXT, (0, 1)), edge(0, 6, 0))
    out = json.loads(json.dumps(page.export(view), allow_nan=False))
    first = out["models"][0]
    assert out["text"] == TEXT and len(out["models"]) == 2
    assert first["knocked_out"] == [{"read": "output", "source": "embedding"}]
    assert len(first["weights"]) == 7 and len(first["weights"][6]) == len(first["tokens"])
    assert sum(first["mean_weights"][6]) == pytest.approx(1, abs=1e-4)


def test_models_that_cannot_be_shown_are_refused(folders, tmp_path, block, full):
    with pytest.raises(UserError, match="no weights"):
        Opened(folders["deepnorm"])
    with pytest.raises(UserError, match="holds no model"):
        Opened(tmp_path)
    with pytest.raises(UserError, match="make demo"):
        find_demo(tmp_path)
    with pytest.raises(UserError, match="one, or two"):
        Page([block, full, block])


def test_a_checkpoint_stands_beside_the_finished_run(folders, tmp_path):
    run = tmp_path / "run"
    (run / "checkpoint").mkdir(parents=True)
    (run / "checkpoint" / "state.json").write_text('{"step": 500}')
    without = shutil.ignore_patterns("tokenizer*")
    shutil.copytree(folders["block"] / "model", run / "checkpoint" / "model", ignore=without)
    with pytest.raises(UserError, match="holds no tokenizer"):
        open_models([run / "checkpoint"])
    finished, earlier = open_models([folders["block"], run / "checkpoint"])
    assert (finished.step, earlier.step) == (1200, 500)
    assert "run/checkpoint" in earlier.label and earlier.vocabulary == finished.vocabulary


def test_an_edit_of_two_hundred_tokens_is_fast(page):
    """The demo's model takes longer than this one; what is bounded here is what the page adds, in processor time: other
    work on the machine is not the page's."""
    text = "The quick brown fox jumps over the lazy dog. " * 12
    view = page.type(View(models=(0, 1)), text)
    assert 200 < len(page.models[0].read(text).ids) < 300
    start = time.process_time()
    page.show(page.click(view, edge(0, 6, 0)))
    assert time.process_time() - start < 1.0


def test_runs_of_one_name_are_told_apart(folders, tmp_path):
    for parent in "ab":
        (tmp_path / parent).mkdir()
        (tmp_path / parent / "block").symlink_to(folders["block"])
    assert [model.name for model in open_models([tmp_path / "a" / "block", tmp_path / "b" / "block"])] == [
        "a/block",
        "b/block",
    ]


def test_threads_are_those_of_the_faster_pass(block, monkeypatch):
    tried, spent = [], []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", tried.append)
    monkeypatch.setattr(block, "read_ids", lambda ids: spent.append(0.002 if tried[-1] == 2 else 0.02))
    monkeypatch.setattr("attnres.app.explorer.time.perf_counter", lambda: sum(spent))
    choose_threads([block])
    assert tried == [1, 2, 2]


def test_few_analyses_are_kept_of_a_large_vocabulary(folders, monkeypatch):
    model = Opened(folders["block"])
    for i in range(20):
        model.read(f"text {i}")
    assert len(model._kept) == KEPT
    monkeypatch.setattr("attnres.app.explorer.KEPT_BYTES", 1.0)
    model.read("one more")
    assert len(model._kept) == 2


def test_encode_has_no_link_for_views_beyond_it():
    assert encode(replace(View("a"), token=5)).endswith("k=5")
