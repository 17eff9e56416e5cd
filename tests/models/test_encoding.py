"""A text becomes the same tokens, or the same refusal, whichever command or function is given it."""

import json

import pytest
import torch
from tiny import SIZE
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

import attnres
from attnres.app.opened import Opened
from attnres.cli import main
from attnres.data.tokenizer import train_tokenizer
from attnres.evals.figures import ask
from attnres.evals.generate import open_speaker
from attnres.evals.scoring import encode_pairs
from attnres.evals.tasks import read_task
from attnres.inspect.subject import prompt_ids
from attnres.inspect.survey import encode
from attnres.models.encoding import encode_document, encode_prompt, token_in_front
from attnres.models.open import open_checkpoint

TEXT = "the quick brown fox jumps over the lazy dog. "
ANY = {"rows": None, "context": None}
CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %} [assistant]{% endif %}"
)


def begun(template="<s> $A", **special):
    """A tokenizer that puts <s> in front of a text."""
    backend, _ = train_tokenizer(300, [TEXT * 200])
    backend.add_special_tokens(["<s>", "</s>"])
    numbers = [(name, backend.token_to_id(name)) for name in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=numbers)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{"bos_token": "<s>", "eos_token": "</s>"} | special)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with such a tokenizer and, as after `add_tokens` alone, two tokens more than its embedding has rows."""
    folder = tmp_path_factory.mktemp("encoding") / "model"
    tokenizer = begun()
    attnres.build(SIZE, "block", vocab_size=len(tokenizer), max_positions=64).save_pretrained(folder)
    tokenizer.chat_template = CHAT
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(folder)
    return folder


def every_way(folder, text):
    """The ids of a text as generation, inspection, the explorer, and a task's context have them."""
    tokenizer = open_checkpoint(folder).tokenizer
    return {
        "generate": open_speaker(folder, device="cpu").encode(text)[0].tolist(),
        "inspect": prompt_ids(attnres.load(folder), text)[0].tolist(),
        "explorer": list(Opened(folder).encoder.encode(text)[0]),
        "context": list(encode_pairs(tokenizer, [(text, " dog")])[0].context),
        "window": [*token_in_front(tokenizer), *encode(tokenizer, text).ids.tolist()],
    }


@pytest.mark.quick("the lazy fox", "<s>")
@pytest.mark.parametrize("text", ["the lazy fox", "<s>the lazy fox", "<s>", "<s><s> fox", "  fox"])
def test_a_text_begins_once_in_every_command(folder, text):
    tokenizer = open_checkpoint(folder).tokenizer
    own = tokenizer(text, add_special_tokens=False)["input_ids"]
    expected = own if text.startswith("<s>") else tokenizer(text)["input_ids"]
    assert every_way(folder, text) == dict.fromkeys(every_way(folder, text), expected)


def test_a_rendered_chat_template_is_the_prompt_that_it_makes(folder):
    speaker = open_speaker(folder, device="cpu")
    turns = [{"role": "user", "content": "fox"}]
    text = speaker.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<s>")
    assert torch.equal(speaker.encode("fox", chat=True), speaker.encode(text))


def test_a_text_that_brings_its_beginning_has_the_same_windows_and_bytes(folder, tmp_path):
    asked = []
    for name, text in (("plain", TEXT * 20), ("begun", "<s>" + TEXT * 20)):
        (tmp_path / f"{name}.txt").write_text(text)
        task = read_task(str(tmp_path / f"{name}.txt"), data=None, limit=None)
        asked.append(ask(task, open_checkpoint(folder), width=16, stride=8, limit=None))
    assert asked[0].requests == asked[1].requests and asked[0].bytes == asked[1].bytes
    beginning = token_in_front(open_checkpoint(folder).tokenizer)
    assert all(tuple(request.context[:1]) == beginning for request in asked[1].requests)


@pytest.mark.parametrize(
    ("template", "special", "front"),
    [
        ("$A", {}, []),
        ("<s> $A", {}, ["<s>"]),
        ("$A </s>", {}, []),
        ("<s> $A </s>", {}, ["<s>"]),
        ("</s> <s> $A", {}, ["</s>", "<s>"]),
        ("<s> $A", {"bos_token": "<s>", "eos_token": "<s>"}, ["<s>"]),
        ("<s> $A </s>", {"bos_token": None, "eos_token": None, "cls_token": "<s>", "sep_token": "</s>"}, ["<s>"]),
    ],
)
def test_what_stands_in_front_stays_and_what_ends_a_text_goes(template, special, front):
    tokenizer = begun(template, **special)
    before = tokenizer.convert_tokens_to_ids(front)
    own = tokenizer("the fox", add_special_tokens=False)["input_ids"]
    ids, spans = encode_prompt(tokenizer, "the fox", **ANY)
    assert ids == [*before, *own] and list(token_in_front(tokenizer)) == before
    assert [("the fox")[start:end] for start, end in spans] == [""] * len(front) + ["the", " fox"]
    assert encode_document(tokenizer, "the fox")[0] == own


HIGH = "fox <think> dog"
COMMANDS = {
    "generate": ["generate", "MODEL", "--prompt", HIGH, "--max-new-tokens", "2"],
    "generate --chat": ["generate", "MODEL", "--prompt", HIGH, "--chat", "--max-new-tokens", "2"],
    "inspect": ["inspect", "MODEL", "--text", HIGH],
    "inspect --attribute": ["inspect", "MODEL", "--text", HIGH, "--attribute"],
    "inspect --corpus": ["inspect", "MODEL", "--corpus", "high.txt"],
    "search": ["search", "MODEL", "embedding@mlp 0", "--corpus", "high.txt"],
    "eval": ["eval", "MODEL", "--tasks", "high.txt"],
    "eval choices": ["eval", "MODEL", "--tasks", "choices.jsonl"],
    "eval words": ["eval", "MODEL", "--tasks", "words.jsonl"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_an_id_past_the_embedding_is_one_sentence_in_every_command(folder, tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "high.txt").write_text(f"{TEXT * 9} {HIGH} {TEXT}")
    (tmp_path / "choices.jsonl").write_text(json.dumps({"query": HIGH, "choices": ["a", "b"], "gold": 0}))
    (tmp_path / "words.jsonl").write_text(json.dumps({"context": "fox", "continuation": "<think>"}))
    tokenizer = open_checkpoint(folder).tokenizer
    with pytest.raises(SystemExit) as stop:
        raise SystemExit(main([str(folder) if part == "MODEL" else part for part in COMMANDS[command]]))
    said = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2
    assert f"token id {tokenizer.convert_tokens_to_ids('<think>')}, and the embedding of" in said
    assert f"has {tokenizer.convert_tokens_to_ids('[PAD]')} rows" in said


@pytest.mark.parametrize("command", ["inspect --corpus", "search", "inspect"])
def test_texts_without_such_an_id_are_read(folder, tmp_path, capsys, command):
    (tmp_path / "high.txt").write_text(TEXT * 9)
    parts = {"MODEL": str(folder), "high.txt": str(tmp_path / "high.txt"), HIGH: TEXT}
    assert main([parts.get(part, part) for part in COMMANDS[command]]) in (0, None)


def test_a_byte_order_mark_is_no_text(tmp_path):
    for name, text in (("a.txt", TEXT), ("a.jsonl", json.dumps({"context": "fox", "continuation": "dog"}))):
        (tmp_path / name).write_bytes(text.encode())
        plain = read_task(str(tmp_path / name), data=None, limit=None)
        (tmp_path / name).write_bytes(text.encode("utf-8-sig"))
        assert read_task(str(tmp_path / name), data=None, limit=None) == plain
