"""The page without its server: it shows what the model did, and says in one sentence what is wrong."""

import contextlib
import json
import re
import shutil
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from attnres.app import draw, serve
from attnres.app.explorer import Opened, choose_threads, find_demo, open_models
from attnres.app.page import Page
from attnres.app.reading import KEPT, _bytes
from attnres.app.state import ATTENDED, LARGEST, LOSS, MAX_CHARACTERS, Cut, View, decode, encode
from attnres.errors import UserError
from attnres.inspect import attribute, token_attention
from attnres.inspect.edits import Ablate
from attnres.inspect.effects import effect
from attnres.inspect.look import LookText
from attnres.models.model_files import tensors_of, write_snapshot
from attnres.text import short

CONTEXT = 512  # of the models in conftest.py
TEXT = "def read(rows, name):\n    return rows[name]\n"


def edge(model, read, source, place=0):
    return {"place": place, "model": model, "read": read, "source": source}


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
    knocked = opened.knock_out(TEXT, (Cut(0, last, 0), Cut(0, 2, 1)))
    names = [opened.sources[last][0], opened.sources[2][1]]
    edits = [Ablate(names[0], reads=last), Ablate(names[1], reads=2)]
    change = effect(opened.model, torch.tensor([opened.read(TEXT).ids]), edits)
    np.testing.assert_allclose(knocked.losses, change.loss_after, rtol=1e-5)
    once = opened.knock_out(TEXT, (Cut(0, last, 0, 4), Cut(0, last, 0, 999)))  # no such token: nothing is cut there
    change = effect(opened.model, torch.tensor([opened.read(TEXT).ids]), Ablate(names[0], reads=last, tokens=4))
    np.testing.assert_allclose(once.losses, change.loss_after, rtol=1e-5)


def test_clicks_knock_out_and_bring_back(page):
    view = View(TEXT, models=(0, 1))
    once = page.actions.click(view, edge(0, 3, 0))
    twice = page.actions.click(once, edge(1, 6, 2))
    assert twice.cuts == (Cut(0, 3, 0), Cut(1, 6, 2))
    assert page.actions.click(page.actions.click(twice, edge(0, 3, 0)), edge(1, 6, 2)) == view
    assert page.actions.reset(twice) == view and page.actions.undo(twice) == once and page.actions.undo(view) == view
    panes = page.show(twice).panes
    assert all("without 1 edge" in pane for pane in panes)
    assert "without" not in page.show(view).panes[0]


def test_a_cut_of_one_token_is_that_tokens(page):
    view = page.actions.span(page.actions.choose_token(View(TEXT), {"place": 0, "token": 4}), "one")
    once = page.actions.click(view, edge(0, 6, 0))
    assert once.cuts == (Cut(0, 6, 0, 4),)
    both = page.actions.click(page.actions.span(once, "all"), edge(0, 6, 0))
    assert both.cuts == (Cut(0, 6, 0, 4), Cut(0, 6, 0))
    assert page.actions.click(both, edge(0, 6, 0) | {"token": 4}).cuts == (Cut(0, 6, 0),)  # as its row of the list says
    longer = replace(page.actions.span(View(TEXT, other=f"{TEXT} and more"), "one"), token=None)
    of_second = page.actions.click(longer, edge(0, 6, 0, place=1)).cuts[0].token
    assert of_second == page.halves.token_of(longer, 1) != page.halves.token_of(longer, 0)
    pane = page.show(once).panes[0]
    assert "at token 4" in pane and "without 1 edge" in pane
    losses = page.models[0].knock_out(TEXT, once.cuts).losses - page.models[0].read(TEXT).losses
    assert abs(losses[:4]).max() < 1e-4 < abs(losses[4])


@pytest.mark.parametrize(
    "action",
    [
        None,
        [],
        ["edge"],
        ["explode", 1],
        [[], 1],
        ["edge", None],
        ["edge", {}],
        ["token", 0],
        ["token", {"place": 0, "token": "0"}],
        ["token", {"place": 0, "token": -1}],
        ["token", {"place": 0, "token": True}],
        ["token", {"place": 0}],
        ["token", {"place": 1, "token": 0}],
        ["edge", edge(0, 99, 0)],
        ["edge", edge(0, 0, 1)],
        ["edge", edge(2, 0, 0)],
        ["edge", edge(0, 6, 0, place=1)],
        ["edge", edge(0, 1.0, 0)],
        ["type", None],
        ["example", "poem"],
        ["models", [2]],
        ["models", []],
        ["by", "size"],
        ["span", 1],
        ["colour", [1]],
        ["restore", {"text": 1}],
        ["visit", {"text": "a"}],
    ],
)
def test_actions_on_what_is_not_there_are_refused(page, action):
    with pytest.raises(UserError, match=r"again|not one of those|the text is none"):
        page.actions.act(View(TEXT), action)


def test_a_link_restores_what_was_shown(page):
    view = View(models=(0, 1))
    for action in [
        ["type", TEXT],
        ["token", {"place": 1, "token": 3}],
        ["edge", edge(1, 6, 0)],
        ["colour", [2, "embedding"]],
        ["by", "weight"],
    ]:
        view = page.actions.act(view, action)
    shown = page.show(view)
    again, said = page.begin("?" + shown.query)
    assert (again, said) == (view, "")
    assert page.show(again).panes == shown.panes
    assert page.begin("?v=x")[1].startswith("this link is damaged")
    opening = page.begin("")[0]
    reading = page.models[0].read(opening.text)
    kinds = [len(set(parts.argmax(1))) for parts in reading.contributions]
    assert kinds[-1 if opening.read is None else opening.read] > 1 or max(kinds) == 1
    assert opening.text and opening.models == (0, 1)
    assert page.begin(encode(View("", models=(1,)), page.keys))[0] == replace(opening, models=(1,), read=None)


def test_edges_of_another_model_are_left_out_with_a_word(page):
    shown = page.show(page.begin(encode(View("a", cuts=(Cut(0, 99, 0), Cut(0, 3, 0))), page.keys))[0])
    assert shown.view.cuts == (Cut(0, 3, 0),) and "left out" in shown.message


def test_what_colours_tokens_follows_the_model(page):
    shown = page.show(page.actions.colour(View(TEXT), [99, "mlp 7"]))
    assert shown.view.read is None and shown.view.source == LARGEST
    assert shown.reads[0] == ("output", -1) and len(shown.reads) == 7
    values = [value for _, value in page.show(page.actions.colour(View(TEXT), [1, LOSS])).sources]
    assert values == [LARGEST, "embedding", "partial", LOSS, ATTENDED]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "There is no text"),
        (" \n\t", "There is no text"),
        ("x" * (MAX_CHARACTERS + 1), f"this page takes {MAX_CHARACTERS:,}"),
        ("Z%q" * (CONTEXT // 2), f"on this page takes {CONTEXT:,}: shorten it"),
    ],
)
def test_a_text_that_cannot_be_read_is_one_sentence_and_the_page_goes_on(page, text, words):
    shown = page.show(page.actions.type(View(models=(0, 1)), text))
    assert words in shown.panes[0] and 'class="error"' in shown.panes[0]
    assert "data-token" in page.show(page.actions.type(shown.view, TEXT)).panes[0]


def test_a_plain_sum_has_no_heaviest_source_and_can_be_edited(folders):
    page = Page([Opened(folders["standard"])])
    pane = page.show(View(TEXT, by="weight")).panes[0]
    assert (
        "All sources of this read weigh the same" in pane
        and "the same for every token" in pane
        and "Pseudo-queries" not in pane
    )
    assert "without 1 edge" in page.show(page.actions.click(View(TEXT), edge(0, 6, 3))).panes[0]


def test_characters_of_several_tokens_are_whole(block):
    text = "Grüße 漢 🎉!"
    reading = block.read(text)
    assert "".join(reading.pieces) == text
    place = reading.names.index("漢 (1 of 3)")
    assert reading.names[place : place + 3] == ["漢 (1 of 3)", "漢 (2 of 3)", "漢 (3 of 3)"]
    assert reading.pieces[place : place + 3] == ["漢", "", ""] and reading.names[-1] == "!"
    pane = Page([block]).show(View(text)).panes[0]
    assert ">漢</span>" in pane and ">·</span>" in pane and "“漢 (2 of 3)”" in pane
    assert block.read("a\ufffd").pieces[1] == "\ufffd"


@pytest.fixture
def words_only(folders):
    """A model whose tokenizer knows three words and has no token for others."""
    model = Opened(folders["block"])
    backend = Tokenizer(WordLevel({"hello": 0, "big": 1, "world": 2}))
    backend.pre_tokenizer = Whitespace()
    model.tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    return model


def test_a_text_reads_as_it_is_where_tokens_hold_no_white_space(words_only):
    assert words_only.read("hello big\n world").pieces == ["hello", " big", "\n world"]


def test_a_link_shows_its_models_among_others_and_says_when_they_are_gone(folders, page):
    view = View(TEXT, models=(1,), cuts=(Cut(1, 6, 1), Cut(0, 6, 0)))
    link = "?" + page.show(view).query
    among = Page([Opened(folders["shallow"]), Opened(folders["full"]), Opened(folders["block"])])
    assert among.begin(link) == (replace(view, cuts=(Cut(1, 6, 1), Cut(2, 6, 0))), "")
    gone = Page([Opened(folders["full"])])
    shown = gone.show(*gone.begin(link))
    assert shown.view.cuts == (Cut(0, 6, 1),) and "were left out" in shown.message
    other = Page([Opened(folders["block"])])
    began, said = other.begin(link)
    assert began.cuts == () and "the model full (" in said and "not open here" in said


def test_models_are_told_apart_by_step_seed_and_what_was_trained(folders, tmp_path):
    """And by nothing else: a copy at another place is the same."""
    for name in ("copy", "trained"):
        shutil.copytree(folders["full"], tmp_path / name)
    path = tmp_path / "trained" / "model.safetensors"
    tensors = load_file(path)
    tensors[next(name for name in tensors if "query" in name)][0, 0] += 1e-3
    save_file(tensors, path, metadata={"format": "pt"})
    full, copied, trained = (Opened(one).key for one in (folders["full"], tmp_path / "copy", tmp_path / "trained"))
    assert full.split("~")[1] == copied.split("~")[1] != trained.split("~")[1]
    assert Opened(folders["block"]).key.startswith("block-1200~")


def test_what_a_tokenizer_cannot_encode_is_one_sentence_and_the_page_opens(words_only):
    page = Page([words_only])
    view, said = page.begin("")
    assert said == "" and "The tokenizer cannot encode the text" in page.show(view).panes[0]
    assert "data-token" in page.show(page.begin("?" + encode(View("hello world"), page.keys))[0]).panes[0]
    assert page.actions.example(view, "code") == view


def test_as_many_candidates_before_a_knock_out_as_after(page):
    reading, effect = page.models[0].read(TEXT), page.models[0].knock_out(TEXT, (Cut(0, 6, 0),))
    for token in range(5):
        assert len(page.models[0].top(reading, None, token)) == 8
        both = page.models[0].top(reading, effect, token)
        assert len({c.piece for c in both}) == len(both) == 8
        assert {float(effect.log_probs[token].exp().max())} <= {c.after for c in both}


def test_one_token_has_a_distribution_and_no_loss(page):
    pane = page.show(page.actions.type(View(), "d")).panes[0]
    assert "One token" in pane and "Next token" in pane and "nats per token" not in pane
    assert "data-token" in page.show(page.actions.click(page.actions.type(View(), "d"), edge(0, 6, 0))).panes[0]


def test_characters_never_seen_are_read_as_bytes_or_said(page, block, monkeypatch):
    assert "never seen" not in page.show(page.actions.type(View(), "☃ 日本 🎉")).panes[0]
    monkeypatch.setattr(block.tokenizer, "_unk_token", "d", raising=False)
    blind = block.tokenizer.decode
    monkeypatch.setattr(block.tokenizer, "decode", lambda ids, **how: blind(ids, **how).replace("☃", ""))
    assert "has never seen some characters of this text (☃)" in page.show(page.actions.type(View(), "snow ☃!")).panes[0]


def test_half_a_character_from_the_browser_is_none(page):
    shown = page.show(page.actions.type(View(), "a\ud83d b"))
    assert (
        "data-token" in shown.panes[0] and decode(dict(p.split("=", 1) for p in shown.query.split("&")), page.keys).text
    )


def test_models_with_different_tokenizers_are_shown_with_a_warning(folders, block):
    page = Page([block, Opened(folders["other"])])
    shown = page.show(View(TEXT, models=(0, 1)))
    assert "different tokenizers" in shown.message and all("data-token" in pane for pane in shown.panes)
    assert page.show(View(TEXT, models=(1,))).message == ""


def test_halves_show_the_read_of_one_name(folders, block):
    """Of a model of two layers "output" is read 4, "mlp 1" 3; of one of three "attention 2" is 4."""
    page = Page([block, Opened(folders["shallow"])])
    view = View(TEXT, models=(0, 1))
    for read, (first, second) in {2: ("attention 1", "attention 1"), 4: ("attention 2", "output")}.items():
        panes = [page.pane(replace(view, read=read), place) for place in range(2)]
        assert [pane.reading.reads[pane.read] for pane in panes] == [first, second]
    turned = page.actions.choose(replace(view, read=3), [1, 0])
    assert (
        page.models[1].reads[turned.read] == "mlp 1" and page.actions.choose(replace(view, read=4), [1, 0]).read is None
    )


def test_halves_show_the_tokens_of_one_place_in_the_text(folders, block):
    page = Page([block, Opened(folders["other"])])
    view = View(TEXT, models=(0, 1))
    ends = [np.cumsum([len(piece) for piece in model.read(TEXT).pieces]).tolist() for model in page.models]
    assert ends[0] != ends[1]
    for place in range(2):
        for token, end in enumerate(ends[place]):
            chosen = page.actions.choose_token(view, {"place": place, "token": token})
            assert page.halves.token_of(chosen, place) == token, "what was clicked is what is chosen"
            there = page.halves.token_of(chosen, 1 - place)
            start = ends[1 - place][there - 1] if there else 0
            assert start < end <= ends[1 - place][there]
            assert page.begin(page.show(chosen).query)[0] == chosen
    alone = page.actions.choose(chosen, [1])
    assert page.halves.token_of(alone, 0) == len(ends[1]) - 1 and alone.half == 0
    two = replace(page.actions.compare(View(TEXT), "another text"), token=1)
    assert [page.halves.token_of(two, place) for place in range(2)] == [1, 1], (
        "of another text the token of that number"
    )


def test_one_model_can_be_shown_alone(page):
    assert [value for _, value in page.choices] == [0, 1]
    both = page.show(page.actions.choose(View(TEXT), [1, 0]))
    assert both.view.models == (1, 0), "in the order in which they were chosen"
    assert len(both.panes) == 2 and both.difference
    alone = page.show(page.actions.choose(both.view, [1]))
    assert len(alone.panes) == 1 and not alone.difference


def test_two_texts_of_one_model_stand_side_by_side(page, block):
    other = "The quick brown fox."
    view = page.actions.click(page.actions.compare(View(TEXT, models=(0, 1)), other), edge(0, 6, 0))
    shown = page.show(view)
    assert shown.view.models == (0,) and len(shown.panes) == 2 and shown.difference
    assert all("without 1 edge" in pane for pane in shown.panes) and other in re.sub("<[^>]+>", "", shown.panes[1])
    means = [block.read(text).means("contribution")[6][1] for text in (TEXT, other)]
    assert f"output reads block 1: contribution {means[1] - means[0]:+.3f}" in shown.difference
    assert page.begin(shown.query)[0] == view
    assert page.show(page.actions.compare(view, None)).view.other is None


def test_scores_are_those_of_the_library_and_stay(page, block):
    view, steps = View(TEXT, token=5), []
    assert "score all 19 edges" in page.show(view).panes[0]
    page.score(view, 0, lambda done, whole: steps.append((done, whole)))
    theirs = attribute(block.model, block.read(TEXT).ids, position=5)
    assert steps[-1] == (19, 19) and block.scored(TEXT, 5).target == theirs.target
    for mine, row in zip(block.scored(TEXT, 5).knockout, theirs.knockout, strict=True):
        np.testing.assert_allclose(mine, row, atol=1e-5)
    pane = page.show(view).panes[0]
    value = short(theirs.knockout[6][1], 3, signed=True)
    assert f"output reads block 1: ln p {value} without it" in pane
    assert "How the prediction after" in pane
    assert "score all 19 edges" in page.show(replace(view, token=4)).panes[0]
    with pytest.raises(UserError, match="no such half"):
        page.score(view, 1, lambda done, whole: None)


def test_others_may_use_a_model_while_it_scores(block):
    answered = []

    def report(done, whole):
        thread = threading.Thread(target=lambda: answered.append(block.read(f"text {done}").loss))
        thread.start()
        thread.join(30)
        assert answered, "the model is held while it scores"

    block.score(TEXT + "x", 3, report)


def test_what_is_being_scored_is_scored_once(folders, monkeypatch):
    """Who asks meanwhile sees how far it is and gets the same; where the first leaves, the next goes on."""
    model, begun, leave = Opened(folders["block"]), [], []

    def slow(*args, progress, **options):
        begun.append(threading.get_ident())
        for _ in range(19):
            progress(1)
        return attribute(*args, **options)

    monkeypatch.setattr("attnres.app.explorer.attribute", slow)
    seen, results = {"first": [], "second": []}, {}

    class Left(Exception):
        pass

    def ask(name, token):
        def report(done, whole):
            seen[name].append(done)
            if name == "first" and done == 5:
                if leave:
                    raise Left
                second.start()
                time.sleep(0.5)

        with contextlib.suppress(Left):
            results[name] = model.score(TEXT, token, report)

    second = threading.Thread(target=ask, args=("second", 3))
    ask("first", 3)
    second.join(60)
    assert len(begun) == 1 and results["first"] is results["second"] and 5 in seen["second"]
    leave.append(True)
    second = threading.Thread(target=ask, args=("second", 4))
    begun.clear()
    ask("first", 4)
    assert results["first"] is results["second"], "it has left: nothing of token 4 yet"
    ask("second", 4)
    assert len(begun) == 2 and model.scored(TEXT, 4) is results["second"] and not model.cache._working


def test_scores_that_are_looked_at_stay(folders, monkeypatch):
    model = Opened(folders["block"])
    monkeypatch.setattr("attnres.app.explorer.attribute", lambda *args, **options: "scores")
    model.score(TEXT, 3, lambda done, whole: None)
    for i in range(2 * KEPT):
        model.read(f"text {i}")
        assert model.scored(TEXT, 3) == "scores"


def test_a_figure_of_queries_is_drawn_once(folders, monkeypatch):
    page, drawn, queries = Page([Opened(folders["block"])]), [], draw.queries
    monkeypatch.setattr(draw, "queries", lambda *args: drawn.append(args) or queries(*args))
    for text in (TEXT, "another", TEXT):
        assert 'class="queries"' in page.show(View(text)).panes[0]
    assert len(drawn) == 1


def test_attention_over_tokens_is_that_of_the_model(page, block):
    theirs = token_attention(block.model, block.read(TEXT).ids)
    pane = page.show(View(TEXT, token=7)).panes[0]
    largest = theirs.mean[1, 7].argmax().item()
    assert f"layer 1 attends to token {largest} " in pane and f"heads {theirs.mean[1, 7].max().item():.3f}" in pane
    assert "mean over heads and layers" in page.show(View(TEXT, token=7, source=ATTENDED)).panes[0]


def test_a_search_gives_texts_to_look_at(page, block):
    corpus = LookText("two texts", lambda: iter([TEXT, "The quick brown fox jumps."]))
    searching = Page(page.models, corpus)
    view = View(TEXT, source="embedding", read=3)
    result, html = searching.search(view, False, lambda done, whole: None)
    assert f"data-hit={chr(34)}{len(result.hits) - 1}{chr(34)}" in html and "two texts" in html
    hit = result.hits[0]
    visited = searching.actions.visit(view, {"text": hit.window, "at": hit.at})
    assert block.read(visited.text).names[visited.token] == hit.token
    assert block.read(visited.text).contributions[3][visited.token][0] == pytest.approx(hit.contribution, abs=1e-5)
    with pytest.raises(UserError, match="choose one source"):
        searching.search(View(TEXT), False, lambda done, whole: None)
    with pytest.raises(UserError, match="--corpus"):
        page.search(view, False, lambda done, whole: None)


def test_the_export_holds_numbers_that_json_has(page):
    view = page.actions.click(View(TEXT, models=(0, 1)), edge(0, 6, 0))
    out = json.loads(json.dumps(page.export(view), allow_nan=False))
    first = out["models"][0]
    assert out["text"] == TEXT and len(out["models"]) == 2
    assert first["knocked_out"] == [{"read": "output", "source": "embedding", "token": None}]
    assert len(first["weights"]) == 7 and len(first["weights"][6]) == len(first["tokens"])
    assert sum(first["weights"][6][0]) == pytest.approx(1, abs=1e-4) == sum(first["contributions"][6][0])


def test_a_model_whose_numbers_are_none_is_shown_and_exported(folders):
    model = Opened(folders["block"])
    with torch.no_grad():
        model.model.get_input_embeddings().weight.fill_(torch.nan)
    page = Page([model])
    view = page.actions.click(View(TEXT, source="embedding"), edge(0, 6, 0))
    page.score(view, 0, lambda done, whole: None)
    pane = page.show(view).panes[0]
    assert "loss – → <b>–</b>" in pane and ", weight –" in pane and "nan" not in pane.lower()
    first = json.loads(json.dumps(page.export(view), allow_nan=False))["models"][0]
    assert set(first["losses"]) == {None} and first["scores"]["log_probability"] is None


def test_models_that_cannot_be_shown_are_refused(folders, tmp_path, block, full):
    with pytest.raises(UserError, match="no weights"):
        open_models([folders["deepnorm"]])
    with pytest.raises(UserError, match="holds no model"):
        Opened(tmp_path)
    with pytest.raises(UserError, match="make demo"):
        find_demo(tmp_path)
    with pytest.raises(UserError, match="one, or two"):
        serve(["a", "b", "c"])


def test_a_checkpoint_stands_beside_the_finished_run(folders, tmp_path):
    run = tmp_path / "run"
    (run / "checkpoint").mkdir(parents=True)
    (run / "checkpoint" / "state.json").write_text('{"step": 500}')
    shutil.copytree(folders["block"] / "model", run / "checkpoint" / "model")
    finished, earlier = open_models([folders["block"], run / "checkpoint"])
    assert (finished.step, earlier.step) == (1200, 500)
    assert "run/checkpoint" in earlier.label and earlier.vocabulary == finished.vocabulary


def test_examples_end_where_the_shortest_context_does(page, monkeypatch):
    whole = page.begin("")[0].text
    for model, context in zip(page.models, (30, 20), strict=True):
        monkeypatch.setattr(model, "context", context)
    start = page.begin("")[0]
    assert whole.startswith(start.text) and whole[len(start.text)] in "\n "
    assert 1 < len(page.models[0].read(start.text).ids) <= 20
    assert page.actions.example(View(models=(0,)), "code").text.startswith(start.text)


def test_kept_checkpoints_stand_before_the_model_that_they_became(folders, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(folders["block"], run)
    for step in (300, 600):
        folder = run / "kept" / f"{step:06d}"
        shutil.copytree(run / "model", folder / "model")
        (folder / "state.json").write_text(f'{{"step": {step}}}')
    models = open_models([run])
    assert [model.label for model in models] == [f"run (block, step {step})" for step in ("300", "600", "1,200")]
    assert [model.is_loaded for model in models] == [False, False, True]
    page = Page(models)
    assert page.begin("")[0].models == (2,)
    shown = page.show(View(TEXT, models=(0, 2)))
    assert len(shown.panes) == 2 and not models[1].is_loaded
    assert "Difference: second less first" in shown.difference
    assert "at step 300 (above) and 1,200" in shown.difference and ", cosine 1.00" in shown.difference


def test_the_steps_that_were_shown_last_stay_loaded(folders, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(folders["block"], run)
    for step in (100, 200, 300, 400):
        folder = run / "kept" / f"{step:06d}"
        shutil.copytree(run / "model", folder / "model")
        (folder / "state.json").write_text(f'{{"step": {step}}}')
    page = Page(open_models([run]))

    def loaded(*models):
        shown = page.show(View(TEXT, models=models))
        assert all("data-token" in pane for pane in shown.panes)
        return [model.step for model in page.models if model.is_loaded]

    assert loaded(0, 1) == [100, 200, 1200]
    assert loaded(0, 4) == [100, 200, 1200] and loaded(2, 4) == [100, 300, 1200], (
        "the one that was shown longest ago goes"
    )
    assert loaded(3, 1) == [200, 400, 1200] and not len(page.models[0].cache)
    again = page.show(View(TEXT, models=(0,))).panes[0]
    assert again == Page(open_models([run])).show(View(TEXT, models=(0,))).panes[0]


def test_a_step_of_which_the_residual_alone_was_kept_shows_what_it_learned(folders, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(folders["block"], run)
    finished = Opened(run)
    tensors = tensors_of(finished.residual)
    for step, part in ((0, 0.0), (600, 0.5), (1200, 1.0)):
        write_snapshot(run, step, tensors | {"query": part * tensors["query"]})
    models = open_models([run])
    labels = ["run (step 0, residual alone)", "run (step 600, residual alone)", "run (block, step 1,200)"]
    assert [model.label for model in models] == labels
    page = Page(models)
    assert page.begin("")[0].models == (2,)
    shown = page.show(View(TEXT, models=(1, 2)))
    assert "train with --keep-at 600" in shown.panes[0] and 'class="queries"' in shown.panes[0]
    sharpness = [finished.residual.sharpness(read) for read in range(1, 7)]
    for value in sharpness:
        assert f"{short(value / 2)} → {short(value)}, cosine 1.00" in shown.difference
    assert "–, cosine" not in page.show(View(TEXT, models=(1, 2))).difference.split("mlp 0")[1]
    assert 'class="learned"' in page.show(View(TEXT, models=(0, 1))).difference, "neither reads a text"
    assert 'class="queries"' not in page.show(View(TEXT, models=(0,))).panes[0], "queries of zero"
    with pytest.raises(UserError, match="only the residual's were kept"):
        models[0].score(TEXT, 3, lambda done, whole: None)
    (run / "residual" / "000600.safetensors").write_bytes(b"no")
    with pytest.raises(UserError, match=r"000600.safetensors cannot be read .* remove it"):
        Page(open_models([run])).show(View(TEXT, models=(1, 2)))


def test_runs_of_one_name_are_told_apart_and_are_no_steps_of_one(folders, tmp_path):
    for parent, residual in zip("ab", ("block", "full"), strict=True):
        (tmp_path / parent).mkdir()
        (tmp_path / parent / "block").symlink_to(folders[residual])
    assert [model.name for model in open_models([tmp_path / "a" / "block", tmp_path / "b" / "block"])] == [
        "a/block",
        "b/block",
    ]


def test_runs_of_one_name_in_folders_of_one_name_open_side_by_side(folders, tmp_path):
    runs = []
    for root, residual in zip(("new", "old"), ("block", "full"), strict=True):
        (tmp_path / root / "demo").mkdir(parents=True)
        runs.append(tmp_path / root / "demo" / "block")
        runs[-1].symlink_to(folders[residual])
    page = Page(open_models(runs))
    assert [model.name for model in page.models] == ["new/demo/block", "old/demo/block"]
    assert page.begin("")[0].models == (0, 1)
    assert page._learned_between(View(TEXT, models=(0, 1))) == ""
    twice = open_models(runs[:1] * 2)
    assert [model.name for model in twice] == ["block"] * 2 and Page(twice).begin("")[0].models == (0, 1)


def test_threads_are_those_of_the_faster_pass(block, monkeypatch):
    tried, spent = [], []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", tried.append)
    monkeypatch.setattr(block, "read_ids", lambda ids, pieces, names: spent.append(0.002 if tried[-1] == 2 else 0.02))
    monkeypatch.setattr("attnres.app.explorer.time.perf_counter", lambda: sum(spent))
    choose_threads([block])
    assert tried == [1, 2, 2]


def test_few_analyses_are_kept_of_a_large_vocabulary(folders, monkeypatch):
    model = Opened(folders["block"])
    for i in range(20):
        model.read(f"text {i}")
    assert len(model.cache) == KEPT
    monkeypatch.setattr("attnres.app.reading.KEPT_BYTES", 1.0)
    model.cache.make("scores", lambda: "what took long and has no tensors")
    for i in range(3):
        model.read(f"one more {i}")
    readings = [one for one in model.cache._made.values() if not isinstance(one, str)]
    assert len(readings) == 2 and "scores" in model.cache._made


def test_all_numbers_of_a_reading_are_counted(block):
    reading = block.read(TEXT)
    rows = [*reading.weights, *reading.contributions]
    assert _bytes(reading) == sum(row.nbytes for row in rows) + reading.log_probs.nbytes + reading.losses.nbytes
    attention = block.attend(TEXT)
    assert _bytes(attention) == attention.mean.nbytes + attention.largest.nbytes
    assert _bytes(attribute(block.model, reading.ids)) == 0, "what took long stays"


def test_encode_has_no_link_for_views_beyond_it():
    query = encode(replace(View("a"), token=5), ["a~0123456789ab"])
    assert decode({"v": query.removeprefix("v=")}, ["a~0123456789ab"]).token == 5
