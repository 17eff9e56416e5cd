"""The page without its server: its numbers are what the model did, and what is wrong is one sentence."""

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
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

from attnres.app import serve
from attnres.app.cache import KEPT, _bytes
from attnres.app.measured import Asked
from attnres.app.opened import Opened, choose_threads, find_demo, open_models
from attnres.app.page import Page, save_page
from attnres.app.state import MAX_CHARACTERS, Cut, View, decode, encode
from attnres.errors import UserError
from attnres.inspect import attribute, circuit, patch, token_attention
from attnres.inspect.edits import Ablate
from attnres.inspect.effects import effect
from attnres.inspect.texts import LookText
from attnres.models.model_files import tensors_of, write_snapshot

CONTEXT = 512  # of the models in conftest.py
TEXT = "def read(rows, name):\n    return rows[name]\n"


def pane(page, view, place=0):
    return page.show(view)["panes"][place]


def nothing(done, whole):
    """A report that nobody reads."""


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


class ByHand:
    """A Full model's pass from hooks of torch on its embedding, attentions and MLPs, and its queries and gains."""

    def __init__(self, model, ids):
        self.model, self.outputs, handles = model, [], []
        layers = model.model.layers
        for module in (model.model.embed_tokens, *(part for one in layers for part in (one.self_attn, one.mlp))):
            handles.append(module.register_forward_hook(self._keep))
        with torch.no_grad():
            model(input_ids=torch.tensor([ids]), use_cache=False)
        for handle in handles:
            handle.remove()
        self.rows = []
        for read in range(len(self.outputs)):
            values = torch.stack(self.outputs[: read + 1], 1)  # (T, sources, d)
            keys = F.rms_norm(values, values.shape[-1:], model.residual.gain[read], 1e-6)
            weights = (keys @ model.residual.query[read]).softmax(-1)
            self.rows.append((values, weights, (weights[..., None] * values).sum(1)))

    def _keep(self, module, args, output):
        self.outputs.append((output[0] if isinstance(output, tuple) else output)[0])

    def log_probs(self, h):
        return self.model.lm_head(self.model.model.norm(h)).log_softmax(-1)


def attentions(model, ids):
    """Each layer's weights (H, T, T), from Transformers' own attention in plain arithmetic."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(input_ids=torch.tensor([ids]), output_attentions=True, use_cache=False)
    model.set_attn_implementation(implementation)
    assert len(out.attentions) == model.config.num_hidden_layers
    return [one[0] for one in out.attentions]


@torch.no_grad()
def test_every_number_is_that_of_a_pass_by_hand(full):
    """Weights, contributions, lens, losses, next tokens, and what cutting each source of the output's read does."""
    full.tokenizer  # noqa: B018
    page, token = Page([full]), 6
    ids = full.read(TEXT).ids
    hand, target = ByHand(full.model, ids), ids[token + 1]
    view = View(TEXT, token=token)
    page.score(view, 0, nothing)
    shown = pane(page, view)
    last = hand.log_probs(hand.rows[-1][2])
    for read, (values, weights, h) in enumerate(hand.rows):
        parts = (weights[..., None] * values * h[:, None]).sum(-1)
        contributions = parts / parts.sum(-1, keepdim=True)
        assert shown["weights"][read] == pytest.approx(weights[token].tolist(), abs=1e-4)
        assert shown["contributions"][read] == pytest.approx(contributions[token].tolist(), abs=1e-3)
        says, lens = hand.log_probs(h)[token], shown["lens"][read]
        assert lens["p"] == pytest.approx(says.exp().max().item(), rel=1e-3)
        assert lens["target"] == pytest.approx(says[target].exp().item(), rel=1e-3)
        assert lens["kl"] == pytest.approx((last[token].exp() * (last[token] - says)).sum().item(), abs=1e-3)
        if read == shown["marked"]:
            assert shown["largest"] == contributions.abs().argmax(-1).tolist()
    losses = -last[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
    assert shown["losses"] == pytest.approx(losses.tolist(), rel=1e-3)
    assert shown["loss"] == pytest.approx(losses.mean().item(), rel=1e-4)
    for one in shown["next"]:
        assert one["before"] == pytest.approx(last[token, one["id"]].item(), rel=1e-3) and one["after"] is None
    assert {one["id"] for one in shown["next"]} == {*last[token].topk(7).indices.tolist(), target}
    for layer, one in enumerate(attentions(full.model, ids)):
        number, weight = shown["attends"][2 * layer][0]
        assert one.mean(0)[token].argmax() == number
        assert one.mean(0)[token, number].item() == pytest.approx(weight, abs=1e-4)
    values, weights, _ = hand.rows[-1]
    for source in range(len(hand.rows)):
        kept = weights.clone()
        kept[:, source] = 0
        h = (kept / kept.sum(-1, keepdim=True)).unsqueeze(-1).mul(values).sum(1)
        change = hand.log_probs(h)[token, target] - last[token, target]
        assert shown["scores"]["measured"][-1][source] == pytest.approx(change.item(), abs=1e-3)
        cut = pane(page, replace(view, cuts=(Cut(0, len(hand.rows) - 1, source),)))
        after = next(one["after"] for one in cut["next"] if one["id"] == target)
        assert after == pytest.approx((last[token, target] + change).item(), abs=1e-3)


def test_cuts_count_in_every_figure_or_in_none(page, block):
    """The switch: with cuts in place the edge has no weight, and scores are those of the edited model."""
    cuts = (Cut(0, 6, 1), Cut(0, 3, 0))
    view = View(TEXT, token=5, cuts=cuts)
    page.score(view, 0, nothing)
    edited, plain = pane(page, view), pane(page, replace(view, edited=False))
    assert edited["weights"][6][1] == 0 == edited["contributions"][6][1] and plain["weights"][6][1] > 0
    assert plain["scores"] is None and edited["scores"]["gradient"][6][1] == 0
    assert edited["scores"]["measured"][6][1] == pytest.approx(0, abs=1e-5)
    assert edited["next"] == plain["next"] and edited["loss_cut"] == plain["loss_cut"] != plain["loss"]
    assert edited["lens"][6] != plain["lens"][6]
    names = [(block.sources[cut.read][cut.source], cut.read) for cut in cuts]
    edits = [Ablate(name, reads=read) for name, read in names]
    ids = block.read(TEXT).ids
    once = effect(block.model, ids[:6], [*edits, Ablate(block.sources[5][1], reads=5)])
    both = effect(block.model, ids[:6], edits)
    wanted = [next(part["after"] for part in one.top if part["id"] == one.top[0]["id"]) for one in (both, once)]
    target = both.top[0]["id"]
    scores = attribute(block.model, ids, position=5, target=target, edits=edits)
    after = next((part["after"] for part in once.top if part["id"] == target), None)
    assert scores.log_probability == pytest.approx(np.log(wanted[0]), abs=1e-4)
    if after is not None:
        assert scores.knockout[5][1] == pytest.approx(np.log(after / wanted[0]), abs=1e-4)


def test_scores_come_as_gradients_first_and_of_many_edges_the_largest_are_measured(page, block, monkeypatch):
    """Forward passes are counted: one for the gradients, one for what lies before the edges, one a batch."""
    monkeypatch.setattr("attnres.app.measured.MEASURED", 5)
    monkeypatch.setattr("attnres.app.measured.SCORED", 4 * 4)
    view, seen, passes = View(TEXT, token=3), [], []
    handle = block.model.register_forward_hook(lambda *args: passes.append(1))
    result = page.score(view, 0, lambda done, whole: seen.append((done, whole, page.scored(view, 0))))
    handle.remove()
    assert len(passes) <= 2 + 2 + 1  # the reading that says what follows the token
    assert seen[0][:2] == (0, 5) and seen[-1][:2] == (5, 5)
    counts = [sum(value is not None for row in one["measured"] for value in row) for *_, one in seen]
    assert counts == [0, 4, 5] and result["edges"] == sum(len(row) for row in block.sources if len(row) > 1)
    whole = attribute(block.model, block.read(TEXT).ids, position=3)
    sizes = sorted((abs(g), r, s) for r, row in enumerate(whole.gradient) for s, g in enumerate(row) if len(row) > 1)
    for _, r, s in sizes[-5:]:
        assert result["measured"][r][s] == pytest.approx(whole.knockout[r][s], abs=1e-4)
    block.cache.clear()


def test_a_page_is_written_in_which_the_last_prediction_of_a_text_is_explained(folders, tmp_path, monkeypatch):
    """Of two models, as far as both take the text; what the text says is the target of both."""
    monkeypatch.setattr("attnres.app.page.FEW", 3)
    save_page([folders["block"], folders["full"]], TEXT * 100, tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text()
    shown = json.loads(re.findall('<script type="application/json" id="saved">(.*)</script>', html)[0])
    text = shown["view"]["text"]
    assert (TEXT * 100).startswith(text) and len(text) < len(TEXT * 100)
    for pane, name in zip(shown["panes"], ("block", "full"), strict=True):
        model = Opened(folders[name])
        ids = model.encoder.encode(text)[0]
        assert (pane["token"], pane["target"]) == (len(ids) - 2, ids[-1])
        scores = attribute(model.model, ids, position=len(ids) - 2, most=3)
        rows = zip(pane["scores"]["measured"], scores.knockout, strict=True)
        pairs = [pair for row, other in rows if len(row) > 1 for pair in zip(row, other, strict=True)]
        assert sum(mine is not None for mine, _ in pairs) == 3
        assert all(mine == pytest.approx(other, abs=1e-4) for mine, other in pairs if mine is not None)
    with pytest.raises(UserError, match="no text"):
        save_page([folders["block"]], " ", tmp_path / "none.html")
    assert not (tmp_path / "none.html").exists()


def test_a_click_takes_few_forward_passes(folders):
    """A new text two, for the reading and what is attended to; another token of it none: the lens has its reads."""
    model, cut = Opened(folders["block"]), (Cut(0, 3, 0),)
    page, passes = Page([model]), []
    model.model.model.layers[0].register_forward_hook(lambda *args: passes.append(1))
    for view, count in (
        (View(TEXT, token=4), 2),
        (View(TEXT, token=5), 0),
        (View(TEXT, token=4), 0),
        (View(TEXT, token=4, cuts=cut), 2),
        (View(TEXT, token=4, cuts=cut, edited=False), 0),
        (View(TEXT, token=4, layer=3), 0),
        (View(TEXT, token=4, layer=2), 1),
    ):
        passes.clear()
        page.show(view)
        assert len(passes) == count, view


def test_a_target_and_what_it_is_compared_with_are_chosen(page, block):
    first, second = (one["id"] for one in pane(page, View(TEXT, token=4))["next"][:2])
    view = View(TEXT, token=4, target=first, against=second)
    result, ids = page.score(view, 0, nothing), block.read(TEXT).ids
    alone = [attribute(block.model, ids, position=4, target=one) for one in (first, second)]
    for read, row in enumerate(result["measured"]):
        expected = np.subtract(alone[0].knockout[read], alone[1].knockout[read])
        if row[0] is not None:
            np.testing.assert_allclose(row, expected, atol=1e-3)
    shown = pane(page, view)
    assert (shown["target"], shown["against"]) == (first, second)
    assert pane(page, replace(view, against=first))["against"] is None
    assert pane(page, replace(view, target=10**6))["target"] == shown["follows"]


def test_models_are_compared_by_single_outputs(page, full):
    """Of Full the columns are its sources; Block's are taken apart into the same ones."""
    block_pane, full_pane = page.show(View(TEXT, models=(0, 1)))["panes"]
    assert block_pane["outputs"]["columns"] == full_pane["outputs"]["columns"]
    assert full_pane["outputs"]["columns"][:3] == ["embedding", "L0 attention", "L0 MLP"]
    assert full_pane["outputs"]["reads"][-2:] == ["L2 MLP", "output"]
    for mine, rows in zip(full_pane["outputs"]["values"], full.read(TEXT).contributions, strict=True):
        assert mine[: rows.shape[1]] == pytest.approx(rows.mean(0).tolist(), abs=1e-4)
        assert not any(mine[rows.shape[1] :])
    for row in block_pane["outputs"]["values"]:
        assert sum(row) == pytest.approx(1, abs=1e-3)
    assert pane(page, View(TEXT))["outputs"] is None


def test_effects_are_compared_by_single_outputs_as_circuits_have_them(page, full):
    """Whose estimates and measured links are held against passes by hand in tests/inspect/test_circuits.py."""
    view = View(TEXT, models=(1, 0), token=6)
    shown = pane(page, view)
    graph = circuit(full.model, full.read(TEXT).ids, position=6, most=5)
    for mine, row in zip(shown["outputs"]["effects"], graph.effects, strict=True):
        assert mine[: len(row)] == pytest.approx(row, abs=1e-4) and not any(mine[len(row) :])
    sent = page.circuit(view, nothing)
    assert sent["places"][-1] == "output" and sent["position"] == 6 and sent["attends"]
    best = {(*one[:4],): one[4] for one in sent["links"] if not one[5]}
    for link in graph.links:
        if link.measured is None and (*link.source, *link.target) in best:
            assert best[(*link.source, *link.target)] == pytest.approx(link.estimate, abs=1e-4)
    exported = page.neuronpedia(view, 0.05)
    assert {one["feature_type"] for one in exported["nodes"]} >= {"logit"} and exported["metadata"]["scan"] == full.name


def test_one_layers_input_is_shown_over_all_tokens_and_its_heads_apart(page, full):
    ids = full.read(TEXT).ids
    assert pane(page, View(TEXT, models=(1,)))["over"] is None
    for layer, cuts in ((2, ()), (3, ()), (2, (Cut(1, 2, 0),))):
        over = pane(page, View(TEXT, models=(1,), token=6, layer=layer, cuts=cuts))["over"]
        reading = full.read(TEXT, cuts)
        np.testing.assert_allclose(over["values"], reading.contributions[layer].T, atol=1e-4)
        if layer == 3:
            assert over["heads"] is None
            continue
        with full.edited(cuts, len(ids)):
            heads = attentions(full.model, ids)[1]
        np.testing.assert_allclose(over["heads"], heads[:, 6, :7], atol=1e-4)


def test_layers_count_from_0_and_blocks_from_1_with_their_layers(page):
    shown = pane(page, View(TEXT))
    assert [one["label"] for one in shown["reads"]][:4] == ["L0 attention", "L0 MLP", "L1 attention", "L1 MLP"]
    assert [one["label"] for one in shown["columns"]] == [
        "embedding", "block 1 (L0)", "block 2 (L1)", "block 3 (L2)", "partial sum",
    ]  # fmt: skip


def test_a_text_is_patched_from_another_of_any_length_with_cuts_in_place_in_both(page, block):
    cut = Cut(0, 3, 0)
    for other in (TEXT.replace("rows", "name"), TEXT.replace("rows, ", "")):
        ids, clean = (block.read(one).ids for one in (TEXT, other))
        for cuts, edited in (((), True), ((cut,), True), ((cut,), False)):
            view = View(TEXT, token=8, other=other, cuts=cuts, edited=edited)
            result = page.patch(view, nothing)
            edits = [Ablate(block.sources[3][0], reads=3)] if cuts and edited else []
            theirs = patch(block.model, clean, ids, position=8, edits=edits)
            assert result["clean"] == pytest.approx(theirs.clean, abs=1e-3)
            assert (result["tokens"], result["alone"]) == (9, theirs.aligned.count(None))
            for mine, row in zip(result["restored"], theirs.restored, strict=True):
                assert mine == pytest.approx(row, abs=1e-2)
    at_one_token = Cut(0, 3, 0, token=2)  # which another text need not have
    assert page.patch(replace(view, edited=True, cuts=(at_one_token,)), nothing) == page.patch(view, nothing)


@pytest.mark.parametrize("model", ["block", "full", "standard"])
def test_a_knock_out_is_that_of_the_library(folders, model):
    opened = Opened(folders[model])
    last = len(opened.reads) - 1
    knocked = opened.read(TEXT, (Cut(0, last, 0), Cut(0, 2, 1)))
    names = [opened.sources[last][0], opened.sources[2][1]]
    edits = [Ablate(names[0], reads=last), Ablate(names[1], reads=2)]
    change = effect(opened.model, torch.tensor([opened.read(TEXT).ids]), edits)
    np.testing.assert_allclose(knocked.losses, change.loss_after, rtol=1e-5)
    once = opened.read(TEXT, (Cut(0, last, 0, 4), Cut(0, last, 0, 999)))  # no such token: nothing is cut there
    change = effect(opened.model, torch.tensor([opened.read(TEXT).ids]), Ablate(names[0], reads=last, tokens=4))
    np.testing.assert_allclose(once.losses, change.loss_after, rtol=1e-5)


def test_a_link_restores_what_was_shown(page):
    view = View(TEXT, models=(0, 1), token=3, cuts=(Cut(1, 6, 0), Cut(0, 6, 0, 2)), by="weight", span="one")
    shown = page.show(view)
    again, said = page.begin("?" + shown["query"])
    assert (again, said) == (view, "") and page.show(again) == shown
    assert page.begin("?v=x")[1].startswith("this link is damaged")
    opening = page.begin("")[0]
    assert opening.text and opening.models == (0, 1)
    assert page.begin(encode(View("", models=(1,)), page.keys))[0] == replace(opening, models=(1,))


def test_edges_of_another_model_are_left_out_with_a_word(page):
    shown = page.show(page.begin(encode(View("a", cuts=(Cut(0, 99, 0), Cut(0, 3, 0))), page.keys))[0])
    assert [cut["read"] for cut in shown["view"]["cuts"]] == [3] and "left out" in shown["message"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there is no text"),
        (" \n\t", "there is no text"),
        ("x" * (MAX_CHARACTERS + 1), f"this page takes {MAX_CHARACTERS:,}"),
        ("Z%q" * (CONTEXT // 2), f"on this page takes {CONTEXT:,}: shorten it"),
    ],
)
def test_a_text_that_cannot_be_read_is_one_sentence(page, text, words):
    shown = page.show(View(text, models=(0, 1)))
    assert all(words in one["error"] for one in shown["panes"])


def test_characters_of_several_tokens_are_whole(block):
    text = "Grüße 漢 🎉!"
    reading = block.read(text)
    assert "".join(reading.pieces) == text
    place = reading.names.index("漢 (1 of 3)")
    assert reading.names[place : place + 3] == ["漢 (1 of 3)", "漢 (2 of 3)", "漢 (3 of 3)"]
    assert reading.pieces[place : place + 3] == ["漢", "", ""] and reading.names[-1] == "!"
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
    link = "?" + page.show(view)["query"]
    among = Page([Opened(folders["shallow"]), Opened(folders["full"]), Opened(folders["block"])])
    assert among.begin(link) == (replace(view, models=(1,), cuts=(Cut(1, 6, 1), Cut(2, 6, 0))), "")
    gone = Page([Opened(folders["full"])])
    shown = gone.show(*gone.begin(link))
    assert len(shown["view"]["cuts"]) == 1 and "left out" in shown["message"]
    began, said = Page([Opened(folders["block"])]).begin(link)
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
    assert said == "" and "the tokenizer cannot encode the text" in pane(page, view)["error"]
    assert pane(page, View("hello world"))["tokens"] == ["hello", " world"]


def test_one_token_has_a_distribution_and_no_loss(page):
    shown = pane(page, View("d"))
    assert shown["loss"] is None and shown["notes"] and shown["follows"] is None and len(shown["next"]) == 7
    assert pane(page, View("d", cuts=(Cut(0, 6, 0),)))["next"][0]["after"] is not None


def test_characters_never_seen_are_said(block, monkeypatch):
    page = Page([block])
    assert pane(page, View("☃ 日本 🎉"))["notes"] == []
    monkeypatch.setattr(block.tokenizer, "_unk_token", "d", raising=False)
    blind = block.tokenizer.decode
    monkeypatch.setattr(block.tokenizer, "decode", lambda ids, **how: blind(ids, **how).replace("☃", ""))
    assert "has never seen some characters of this text (☃)" in pane(page, View("snow ☃!"))["notes"][0]


def test_models_with_different_tokenizers_are_shown_with_a_warning(folders, block):
    """Tokens are those that end at one place of the text."""
    page = Page([block, Opened(folders["other"])])
    shown = page.show(View(TEXT, models=(0, 1)))
    assert "different tokenizers" in shown["message"] and page.show(View(TEXT, models=(1,)))["message"] == ""
    ends = [np.cumsum([len(piece) for piece in one["tokens"]]).tolist() for one in shown["panes"]]
    assert ends[0] != ends[1]
    for token, end in enumerate(ends[0]):
        there = page.token_of(View(TEXT, models=(0, 1), token=token), 1)
        assert (ends[1][there - 1] if there else 0) < end <= ends[1][there]


def test_others_may_use_a_model_while_it_scores(page, block):
    answered = []

    def report(done, whole):
        thread = threading.Thread(target=lambda: answered.append(block.read(f"text {done}").loss))
        thread.start()
        thread.join(30)
        assert answered, "the model is held while it scores"

    page.score(View(TEXT + "x", token=3), 0, report)


def test_what_is_being_scored_is_scored_once(folders, monkeypatch):
    """Who asks meanwhile sees how far it is and gets the same; where the first leaves, the next goes on."""
    model, begun, leave = Opened(folders["block"]), [], []

    def slow(*args, **options):
        begun.append(threading.get_ident())
        return attribute(*args, **options | {"batch_size": 1})

    monkeypatch.setattr("attnres.app.measured.attribute", slow)
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
            results[name] = model.score(Asked(TEXT, token, 5), report)

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
    assert len(begun) == 2 and model.scored(Asked(TEXT, 4, 5)) is results["second"] and not model.cache._working


def test_scores_that_are_looked_at_stay(folders):
    model = Opened(folders["block"])
    of = Asked(TEXT, 3, 5)
    scores = model.score(of, nothing)
    for i in range(2 * KEPT):
        model.read(f"text {i}")
        assert model.scored(of) is scores


def test_attention_over_tokens_is_that_of_the_model(page, block):
    theirs = token_attention(block.model, block.read(TEXT).ids)
    attends = pane(page, View(TEXT, token=7))["attends"]
    assert attends[1] is None and attends[-1] is None
    for layer in range(3):
        number, weight = attends[2 * layer][0]
        assert number == theirs.mean[layer, 7].argmax() and weight == pytest.approx(
            theirs.mean[layer, 7].max().item(), rel=1e-3
        )


def test_a_search_gives_texts_to_look_at(page, block):
    corpus = LookText("two texts", lambda: iter([TEXT, "The quick brown fox jumps."]))
    view = View(TEXT, read=3, source=0)
    result = Page(page.models, corpus).search(view, False, nothing)
    hit = result["hits"][0]
    reading = block.read(hit["text"])
    assert reading.contributions[3][hit["at"]][0] == pytest.approx(hit["value"], abs=1e-4)
    assert result["documents"] == 2 and all(one["token"].strip() for one in result["hits"])
    cut = replace(view, cuts=(Cut(0, 3, 0),))
    assert {one["value"] for one in Page(page.models, corpus).search(cut, False, nothing)["hits"]} == {0}
    assert Page(page.models, corpus).search(replace(cut, edited=False), False, nothing) == result
    with pytest.raises(UserError, match="no such edge"):
        Page(page.models, corpus).search(replace(view, read=99), False, nothing)
    with pytest.raises(UserError, match="--corpus"):
        page.search(view, False, nothing)


def test_a_model_whose_numbers_are_none_is_shown(folders):
    model = Opened(folders["block"])
    with torch.no_grad():
        model.model.get_input_embeddings().weight.fill_(torch.nan)
    page = Page([model])
    view = View(TEXT, cuts=(Cut(0, 6, 0),), tab="training")
    page.score(view, 0, nothing)
    shown = json.loads(json.dumps(page.show(view), allow_nan=False))["panes"][0]
    assert shown["loss"] is None and set(shown["losses"]) == {None} and shown["scores"]["edges"] == 18


def test_models_that_cannot_be_shown_are_refused(folders, tmp_path):
    with pytest.raises(UserError, match="no weights"):
        open_models([folders["deepnorm"]])
    with pytest.raises(UserError, match="holds no model"):
        Opened(tmp_path)
    assert [path.name for path in find_demo(tmp_path)] == ["example"]
    assert "harbour" in Page(open_models(find_demo(tmp_path))).begin("")[0].text  # prose, as it was trained on
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
    assert len(shown["panes"]) == 2 and not models[1].is_loaded
    assert [(one["run"], one["step"]) for one in page.choices] == [(2, 300), (2, 600), (2, 1200)]


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
        assert all("tokens" in one for one in shown["panes"])
        return [model.step for model in page.models if model.is_loaded]

    assert loaded(0, 1) == [100, 200, 1200]
    assert loaded(0, 4) == [100, 200, 1200] and loaded(2, 4) == [100, 300, 1200], (
        "the one that was shown longest ago goes"
    )
    assert loaded(3, 1) == [200, 400, 1200] and not len(page.models[0].cache)


def test_a_step_of_which_the_residual_alone_was_kept_shows_what_it_learned(folders, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(folders["block"], run)
    finished = Opened(run)
    tensors = tensors_of(finished.residual)
    for step, part in ((0, 0.0), (300, 0.5), (1200, 1.0)):
        write_snapshot(run, step, tensors | {"query": part * tensors["query"]})
    models = open_models([run])
    assert [model.label for model in models] == [
        "run (step 0, residual alone)",
        "run (step 300, residual alone)",
        "run (block, step 1,200)",
    ]
    page = Page(models)
    assert page.begin("")[0].models == (2,) and [one["reads"] for one in page.choices] == [False, False, True]
    training = pane(page, View(TEXT, models=(2,), tab="training"))["training"]
    sharpness = [finished.residual.sharpness(read) for read in range(7)]
    assert training["first"] == 300, "at the start queries are zero"
    assert training["turned"][1:] == pytest.approx([1.0] * 6)
    assert training["sharpness"][1:] == pytest.approx(sharpness[1:], rel=1e-4)
    assert training["before"][1:] == pytest.approx([value / 2 for value in sharpness[1:]], rel=1e-4)
    assert pane(page, View(TEXT, models=(2,)))["training"] is None
    with pytest.raises(UserError, match="choose another step"):
        page.show(View(TEXT, models=(0,)))
    (run / "residual" / "000300.safetensors").write_bytes(b"no")
    with pytest.raises(UserError, match=r"000300.safetensors cannot be read .* remove it"):
        Page(open_models([run])).models[1].residual  # noqa: B018


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
    twice = open_models(runs[:1] * 2)
    assert [model.name for model in twice] == ["block"] * 2 and Page(twice).begin("")[0].models == (0, 1)


def test_threads_are_those_of_the_faster_pass(block, monkeypatch):
    tried, spent = [], []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", tried.append)
    monkeypatch.setattr(block, "read_ids", lambda ids, pieces, names: spent.append(0.002 if tried[-1] == 2 else 0.02))
    monkeypatch.setattr("attnres.app.opened.time.perf_counter", lambda: sum(spent))
    choose_threads([block])
    assert tried == [1, 2, 2]


def test_few_analyses_are_kept_of_a_large_vocabulary(folders, monkeypatch):
    model = Opened(folders["block"])
    for i in range(20):
        model.read(f"text {i}")
    assert len(model.cache) == KEPT
    monkeypatch.setattr("attnres.app.cache.KEPT_BYTES", 1.0)
    model.cache.make("scores", lambda: "what took long and has no tensors")
    for i in range(3):
        model.read(f"one more {i}")
    readings = [one for one in model.cache._made.values() if not isinstance(one, str)]
    assert len(readings) == 2 and "scores" in model.cache._made


def test_all_numbers_of_a_reading_are_counted(block):
    reading = block.read(TEXT)
    rows = [*reading.weights, *reading.contributions, *reading.vectors]
    assert (
        _bytes(reading)
        == sum(row.nbytes for row in rows) + reading.log_probs.nbytes + reading.losses.nbytes + reading.outputs.nbytes
    )
    attention = block.attend(TEXT)
    assert _bytes(attention) == attention.mean.nbytes + attention.largest.nbytes
    assert _bytes(attribute(block.model, reading.ids)) == 0, "what took long stays"


def test_encode_has_no_link_for_views_beyond_it():
    query = encode(replace(View("a"), token=5), ["a~0123456789ab"])
    assert decode({"v": query.removeprefix("v=")}, ["a~0123456789ab"]).token == 5
