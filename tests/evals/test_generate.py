"""Text from a model: the tokens that Transformers would generate, streamed, seeded, with the depth they read from."""

import dataclasses
import re

import pytest
import torch
from tapes import Tape
from tiny import SIZE
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from attnres import UserError
from attnres.evals.config import GenerateConfig
from attnres.evals.decoding import Replays
from attnres.evals.generate import Speaker, beside, generate, open_speaker, speak
from attnres.inspect import record
from attnres.models import build
from attnres.models.encoding import piece
from attnres.ops import dispatch, eager
from attnres.ops.bank import Bank, Banks
from attnres.text import visible
from attnres.training import graphs

PROMPT = "the quick brown fox"


@pytest.fixture(scope="module")
def speakers(folders):
    return {name: open_speaker(folders[name], device="cpu") for name in ("block", "full", "plain", "standard", "other")}


def uncached(speaker, prompt, count):
    """The likeliest tokens, each from a pass over everything before it."""
    ids = speaker.encode(prompt)
    for _ in range(count):
        with torch.no_grad():
            logits = speaker.model(input_ids=ids, use_cache=False).logits[0, -1]
        ids = torch.cat([ids, logits.argmax()[None, None]], 1)
    return ids[0, -count:]


@pytest.mark.parametrize("name", ["block", "full", "plain"])
def test_greedy_text_is_the_likeliest_at_each_step(speakers, name):
    speaker = speakers[name]
    expected = speaker.tokenizer.decode(uncached(speaker, PROMPT, 12), skip_special_tokens=True)
    assert generate(speaker, PROMPT, max_new_tokens=12, greedy=True) == expected


@pytest.mark.parametrize("name", ["block", "plain"])
def test_tokens_are_replayed_as_graphs(speakers, name, monkeypatch):
    """Those of passes without a graph; a prompt's pass has a graph for its length, and a watched pass none. Sources lie
    in a bank as on CUDA, of which plain torch makes the reads: a tape records no C call."""
    row = dispatch.KERNELS["cpu"]._replace(load=lambda: eager, why_not=lambda call: None, bank=Bank)
    monkeypatch.setitem(dispatch.KERNELS, "cpu", row)
    speaker = dataclasses.replace(speakers[name], replays=Replays())
    other = " ".join(reversed(PROMPT.split()))
    how = {"max_new_tokens": 8, "greedy": True}
    with monkeypatch.context() as patch:
        if name == "block":
            patch.setattr(speaker.model.residual, "banks", Banks())
        expected = {prompt: generate(speaker, prompt, **how) for prompt in (PROMPT, other)}
        monkeypatch.setattr(graphs, "Graph", Tape)
        monkeypatch.setattr("attnres.evals.generate.why_not_captured", lambda model: None)
        for turn in range(4):
            assert generate(speaker, PROMPT, **how) == expected[PROMPT]
            assert len(speaker.replays.graphs) == (2 if turn == graphs.WARM_UP else 1)  # a token's, then the prompt's
        tapes = [graph for graph, *_ in speaker.replays.graphs.values()]
        assert sorted(tape.replays for tape in tapes) == [1, 4 * 7 - graphs.WARM_UP]
        assert generate(speaker, other, **how) == expected[other]  # of the same length
        assert sorted(tape.replays for tape in tapes) == [2, 5 * 7 - graphs.WARM_UP]
        if name == "block":
            assert generate(speaker, PROMPT, on_token=lambda token: None, **how) == expected[PROMPT]
            assert sorted(tape.replays for tape in tapes) == [2, 5 * 7 - graphs.WARM_UP]
            assert {type(bank) for bank in speaker.model.residual.banks._waiting} == {Bank}
    assert "forward" not in vars(speaker.model)


def test_what_cannot_be_captured_is_said_once_and_generated_all_the_same(speakers, monkeypatch, caplog):
    def refused(function):
        raise RuntimeError("a kernel was refused")

    speaker = dataclasses.replace(speakers["block"], replays=Replays())
    expected = generate(speaker, PROMPT, max_new_tokens=8, greedy=True)
    monkeypatch.setattr(graphs, "Graph", refused)
    monkeypatch.setattr("attnres.evals.generate.why_not_captured", lambda model: None)
    for _ in range(2):
        assert generate(speaker, PROMPT, max_new_tokens=8, greedy=True) == expected
    assert [record.message.endswith("a kernel was refused") for record in caplog.records] == [True]


def test_a_folder_a_model_in_memory_and_a_speaker_say_the_same(folders, speakers):
    speaker = speakers["block"]
    texts = {
        generate(str(folders["block"]), PROMPT, max_new_tokens=6, greedy=True),
        generate(folders["block"], PROMPT, max_new_tokens=6, greedy=True),
        generate(speaker, PROMPT, max_new_tokens=6, greedy=True),
        generate(speaker.model, PROMPT, tokenizer=speaker.tokenizer, max_new_tokens=6, greedy=True),
    }
    assert len(texts) == 1
    with pytest.raises(UserError, match="a model in memory needs its tokenizer"):
        generate(speaker.model, PROMPT)


def test_sampling_is_seeded_and_leaves_the_random_state_alone(speakers):
    def say(seed):
        return generate(speakers["block"], PROMPT, max_new_tokens=12, seed=seed, temperature=1.5)

    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert say(1) == say(1)
    assert len({say(seed) for seed in range(4)}) > 1
    assert torch.equal(before, torch.get_rng_state())


def test_the_narrowest_sampling_is_greedy(speakers):
    greedy = generate(speakers["block"], PROMPT, max_new_tokens=8, greedy=True)
    assert generate(speakers["block"], PROMPT, max_new_tokens=8, top_k=1) == greedy
    assert generate(speakers["block"], PROMPT, max_new_tokens=8, top_p=1e-6) == greedy
    assert generate(speakers["block"], PROMPT, max_new_tokens=8, temperature=1e-4) == greedy


def test_the_models_own_settings_hold_where_none_are_given(speakers, monkeypatch):
    speaker = speakers["block"]
    calls = []
    real = speaker.model.generate
    monkeypatch.setattr(
        speaker.model, "generate", lambda *a, **kw: (calls.append(kw["generation_config"]), real(*a, **kw))[1]
    )
    generate(speaker, PROMPT, max_new_tokens=2)
    assert (calls[-1].top_k, calls[-1].top_p, calls[-1].temperature, calls[-1].do_sample) == (0, 1.0, 1.0, True)
    monkeypatch.setattr(speaker.model.generation_config, "top_k", 7)
    monkeypatch.setattr(speaker.model.generation_config, "temperature", 0.6)
    generate(speaker, PROMPT, max_new_tokens=2, temperature=0.9)
    assert (calls[-1].top_k, calls[-1].temperature) == (7, 0.9)


def test_pieces_are_the_text(speakers):
    pieces = []
    text = generate(speakers["block"], PROMPT, max_new_tokens=20, seed=3, on_text=pieces.append)
    assert "".join(pieces) == text
    assert len(pieces) > 1


def test_it_stops_where_the_context_ends(speakers):
    speaker = speakers["block"]
    tokens = []
    generate(speaker, PROMPT, max_new_tokens=500, greedy=True, on_token=lambda depth: tokens.append(depth.token))
    assert len(tokens) == speaker.context - speaker.encode(PROMPT).shape[1] == 60


@pytest.mark.parametrize("name", ["block", "full"])
def test_depth_is_what_the_predicting_pass_read(speakers, name):
    """By the recording of a pass over the whole text, without a cache."""
    speaker = speakers[name]
    calls = []
    generate(speaker, PROMPT, max_new_tokens=5, greedy=True, on_token=calls.append)
    assert speaker.model.residual.observer is None
    ids = speaker.encode(PROMPT)
    for depth in calls:
        with torch.no_grad(), record(speaker.model, tokens=True) as trace:
            logits = speaker.model(input_ids=ids, use_cache=False).logits[0, -1]
        rows = [
            dict(zip(names, parts[0, -1].tolist()))
            for names, parts in zip(trace.sources, trace.token_contributions, strict=True)
        ]
        assert depth.token == logits.argmax()
        assert depth.text == piece(speaker.tokenizer, depth.token)
        assert {source.name: part for source, part in depth.output} == pytest.approx(rows[-1], abs=1e-5)
        sizes = [abs(part) for _, part in depth.output]
        assert sizes == sorted(sizes, reverse=True)
        size = 2 if name == "block" else 1  # of a part of the depth: two sublayers a block, or six in up to eight parts
        assert len(depth.blocks) == 6 // size
        for i, (_, source, part) in enumerate(depth.blocks):
            reads = rows[i * size : (i + 1) * size]
            means = {key: sum(row.get(key, 0) for row in reads) / size for row in reads for key in row}
            assert abs(part) == pytest.approx(max(map(abs, means.values())), abs=1e-5)
            assert means[source.name] == pytest.approx(part, abs=1e-5)
        assert depth.line().startswith(visible(depth.text)) and depth.output[0][0].label in depth.line()
        ids = torch.cat([ids, torch.tensor([[depth.token]])], 1)


@pytest.mark.parametrize("residual", ["ddl", "hyper_connections"])
def test_depth_shows_parts_of_a_read_also_where_weights_are_none(speakers, residual):
    """The weights of these are factors of any size: the parts of a read sum to one all the same."""
    tokenizer = speakers["block"].tokenizer
    model = build(SIZE, residual, vocab_size=len(tokenizer), max_positions=64)
    tokens = []
    generate(model, PROMPT, tokenizer=tokenizer, max_new_tokens=3, greedy=True, on_token=tokens.append)
    assert len(tokens) == 3
    for token in tokens:
        assert sum(part for _, part in token.output) == pytest.approx(1, abs=1e-4)


def test_depth_needs_weights_and_one_recording_at_a_time(speakers):
    with pytest.raises(UserError, match="residual 'standard' has the same weights"):
        generate(speakers["standard"], PROMPT, max_new_tokens=2, on_token=print)
    assert speakers["standard"].model.residual.observer is None
    with pytest.raises(UserError, match="Qwen3ForCausalLM has no depth reads to show"):
        generate(speakers["plain"], PROMPT, max_new_tokens=2, on_token=print)
    with record(speakers["block"].model), pytest.raises(UserError, match="is being recorded already"):
        generate(speakers["block"], PROMPT, max_new_tokens=2, on_token=print)


def test_a_chat_template_frames_the_prompt(speakers):
    speaker = speakers["block"]
    with pytest.raises(UserError, match="has no chat template: leave out --chat"):
        speaker.encode(PROMPT, chat=True)
    template = "{% for m in messages %}the {{ m.content }} dog{% endfor %}"
    speaker.tokenizer.chat_template = template
    try:
        framed = speaker.encode("lazy", chat=True)
        assert framed.tolist() == speaker.encode("the lazy dog").tolist()
    finally:
        speaker.tokenizer.chat_template = None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"greedy": True, "top_k": 3}, "greedy takes the likeliest token: leave out"),
        ({"temperature": 0.0}, "temperature is 0.0: expected 1e-06 or more, or greedy"),
        ({"temperature": 1e-300}, "temperature is 1e-300: expected 1e-06 or more"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0: expected a whole number"),
        ({"top_p": 1.5}, "top_p is 1.5: expected a number above 0, at most 1"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": "a \udcff"}, "the prompt is not valid UTF-8"),
        ({"prompt": "the lazy dog " * 60}, "tokens and .* takes 64: shorten it"),
    ],
)
def test_mistakes(speakers, options, message):
    options = {"prompt": PROMPT, **options}
    with pytest.raises(UserError, match=message):
        generate(speakers["block"], **options)


def test_a_prompt_of_which_the_tokenizer_makes_no_token_is_refused(speakers):
    words = Tokenizer(models.WordLevel({"fox": 0}, unk_token=None))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    speaker = Speaker("words", speakers["block"].model, PreTrainedTokenizerFast(tokenizer_object=words), 64)
    with pytest.raises(UserError, match="the tokenizer of words makes no token of the prompt"):
        generate(speaker, "   ")


def test_a_tokenizer_of_another_model_is_refused(speakers):
    small = speakers["other"]
    wrong = Speaker("small", small.model, speakers["block"].tokenizer, 64)
    high = next(text for text, id in wrong.tokenizer.get_vocab().items() if id == 319).replace("Ġ", " ")
    with pytest.raises(UserError, match=r"token id 3\d\d, and the embedding of small has 300 rows"):
        generate(wrong, high)


def test_two_models_are_timed_in_turn(speakers):
    order = []
    watched = []
    for name in ("block", "plain"):
        speaker = speakers[name]

        class Model:
            def __init__(self, speaker, name):
                self.real, self.name = speaker.model, name

            def __getattr__(self, attribute):
                return getattr(self.real, attribute)

            def generate(self, *args, **kwargs):
                order.append(self.name)
                return self.real.generate(*args, **kwargs)

        watched.append(dataclasses.replace(speaker, model=Model(speaker, name)))
    sentence = beside(watched, PROMPT, 6, rounds=3)
    assert order == ["block", "plain", *("block", "plain"), *("plain", "block"), *("block", "plain")]
    first, second, ratio, low, high = map(float, re.findall(r"[\d,]+\.\d+", sentence.replace(",", ""))[:5])
    assert first > 0 and second > 0 and low <= ratio <= high
    assert "3 rounds of 6 tokens in turn" in sentence
    with pytest.raises(UserError, match="timing needs two tokens or more"):
        beside(watched, PROMPT, 1)


def test_the_command_prints_prompt_text_and_depth(folders, capsys):
    folder = str(folders["block"])
    how = {"max_new_tokens": 5, "greedy": True}
    speak(GenerateConfig(folder, PROMPT, **how))
    text = generate(folder, PROMPT, **how)
    assert capsys.readouterr().out == f"{PROMPT}{text}\n"
    with pytest.raises(UserError, match="max_new_tokens is 0"):
        speak(GenerateConfig(folder, PROMPT, max_new_tokens=0))
    assert capsys.readouterr().out == ""
    speak(GenerateConfig(folder, PROMPT, show_depth=True, **how))
    lines = capsys.readouterr().out.splitlines()
    assert sum(" output: " in line and "| b1 " in line for line in lines) == 5
    speak(GenerateConfig(folder, PROMPT, beside=str(folders["plain"]), **how))
    assert "ratio" in capsys.readouterr().out.splitlines()[-1]
    with pytest.raises(UserError, match="timing needs two tokens or more"):
        speak(GenerateConfig(folder, PROMPT, beside=str(folders["plain"]), max_new_tokens=1))
    assert capsys.readouterr().out == ""


def test_an_error_amid_the_text_has_a_line_of_its_own(folders, capsys, monkeypatch):
    def fail(*rest, on_text, **more):
        on_text(" and so")
        raise UserError("that is all")

    monkeypatch.setattr("attnres.evals.generate.generate", fail)
    with pytest.raises(UserError, match="that is all"):
        speak(GenerateConfig(str(folders["block"]), PROMPT))
    assert capsys.readouterr().out == f"{PROMPT} and so\n"
