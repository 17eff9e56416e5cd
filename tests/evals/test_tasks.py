"""Task files and hub rows become the same questions; what is wrong with a file is said with its line."""

import importlib.util
import json
import os
import re
import sys
import types
from pathlib import Path

import pytest

from attnres import UserError
from attnres.evals.tasks import OF_LM_EVAL, TASKS, read_task

DATA = Path(os.environ.get("ATTNRES_TEST_DATA", "absent")) / "eval"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="ATTNRES_TEST_DATA does not name a folder with eval/")

ROWS = {
    "hellaswag": {
        "activity_label": "Roof [substeps] repair",
        "ctx_a": "A man sits. [title] On a roof.",
        "ctx_b": "he",
        "endings": ["[step] waits.", "works.", "sleeps.", "eats."],
        "label": "1",
    },
    "lambada": {"text": "I came to see the king"},
}
FIRST = {
    "hellaswag": ("Roof repair: A man sits.. On a roof. He", "  waits.", 1),
    "lambada": ("I came to see the", " king", 0),
}


@pytest.fixture
def hub(monkeypatch):
    """A library `datasets` that holds one row of each data set, in the hub's own shape."""
    calls = []

    def load_dataset(repository, config, split):
        calls.append((repository, config, split))
        if repository == "Salesforce/wikitext":
            return [{"text": ""}, {"text": " = A = \n"}, {"text": " words .\n"}]
        (name,) = [name for name, known in TASKS.items() if known.hub == (repository, config, split)]
        return [ROWS[name]]

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


@pytest.mark.parametrize("name", sorted(ROWS))
def test_rows_of_the_hub_read_as_lm_eval_reads_them(hub, name):
    task = read_task(name)
    context, continuation, gold = FIRST[name]
    assert task.items[0].pairs[0] == (context, continuation)
    assert task.items[0].gold == gold
    assert task.source == ":".join(part for part in TASKS[name].hub if part)
    assert task.kind == ("word" if name == "lambada" else "choice")


def test_wikitext_from_the_hub_and_from_a_file_are_the_same_text(hub, tmp_path):
    (tmp_path / "wikitext2_test.raw").write_text(" \n = A = \n words .", "utf-8")
    assert read_task("wikitext2").text == read_task("wikitext2", tmp_path).text == "\n\n = A = \n\n\n words .\n"


LOCAL = {
    "hellaswag_val": {"query": "Roof: He", "choices": ["a.", "b."], "gold": 1},
    "lambada_openai": {"context": "see the", "continuation": "king"},
}
PROMPTS = {
    "hellaswag": "Roof: He",
    "lambada": "see the",
}


@pytest.mark.parametrize("file", sorted(LOCAL))
def test_local_files_make_the_same_prompts(tmp_path, file):
    (tmp_path / f"{file}.jsonl").write_text(f"\n{json.dumps(LOCAL[file])}\n\n", "utf-8")
    name = file.removesuffix("_val").removesuffix("_openai")
    task = read_task(name, tmp_path)
    assert task.items[0].pairs[0][0] == PROMPTS[name]
    assert all(continuation.startswith(" ") for _, continuation in task.items[0].pairs)
    assert task.source.endswith(f"{file}.jsonl")


def test_a_file_of_ones_own_is_a_task(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"query": "It is ", "choices": ["so", "not so"], "gold": 0}\n' * 3)
    task = read_task(str(path), limit=2)
    assert (task.name, task.kind, len(task.items)) == ("mine", "choice", 2)
    assert task.items[0].characters == (2, 6)
    (tmp_path / "mine.txt").write_text("some words")
    assert read_task(str(tmp_path / "mine.txt")).text == "some words"


GOOD = '{"query": "q", "choices": ["a", "b"], "gold": 0}'


def test_a_file_that_is_called_like_a_task_is_a_file(tmp_path):
    """Its lines are taken as they are, where the task's would be put into its words."""
    path = tmp_path / "hellaswag.jsonl"
    path.write_text(json.dumps({"query": "Which?", "choices": ["a", "b"], "gold": 0}))
    task = read_task(str(path), None, None)
    assert task.name == "hellaswag.jsonl" and task.items[0].pairs[0][0] == "Which?"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{GOOD}\n{{\n", r"mine.jsonl line 2 is not valid JSON"),
        (f"{GOOD}\n[1]\n", r"mine.jsonl line 2: expected query \(text\)"),
        (f'{GOOD}\n\n{{"query": "q", "choices": ["a", "b"], "gold": 2}}', "mine.jsonl line 3: expected"),
        ('{"query": "q", "choices": ["a", "b"], "gold": true}', "line 1: expected"),
        ('{"query": "q", "choices": ["a"], "gold": 0}', "line 1: expected"),
        ('{"query": "q", "choices": ["a", ""], "gold": 0}', "line 1: expected"),
        ('{"query": 3, "choices": ["a", "b"], "gold": 0}', "line 1: expected"),
        ('{"context": "a"}', "line 1: expected"),
        ("", "mine.jsonl has no items"),
        (f'{GOOD}\n{{"context": "a", "continuation": "b"}}', "mixes words to predict and choices"),
    ],
)
def test_a_malformed_file_is_named_with_its_line(tmp_path, text, message):
    (tmp_path / "mine.jsonl").write_text(text)
    with pytest.raises(UserError, match=message):
        read_task(str(tmp_path / "mine.jsonl"))


@pytest.mark.long
def test_a_task_that_is_lm_evals_says_its_name_there(tmp_path):
    """Its files are searched: lm-eval itself takes a minute to read the 14,000 of them."""
    for name in OF_LM_EVAL:
        with pytest.raises(UserError, match=f"lm-eval:{name} "):
            read_task(name, tmp_path)
    (package,) = importlib.util.find_spec("lm_eval").submodule_search_locations
    files = (path.read_text(encoding="utf-8") for path in Path(package, "tasks").rglob("*.yaml"))
    assert set(OF_LM_EVAL) <= {name for text in files for name in re.findall(r"^task: *(\w+)", text, re.MULTILINE)}


def test_other_mistakes(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"unknown task 'helaswag': did you mean 'hellaswag'"):
        read_task("helaswag")
    with pytest.raises(UserError, match=r"has no lambada\*\.jsonl: expected one file for the task lambada"):
        read_task("lambada", tmp_path)
    with pytest.raises(UserError, match=r"absent does not exist: --data is the folder"):
        read_task("lambada", tmp_path / "absent")
    (tmp_path / "rows.jsonl").write_text(GOOD)
    with pytest.raises(UserError, match=r"rows.jsonl is a file: --data is the folder of the tasks' files"):
        read_task("lambada", tmp_path / "rows.jsonl")
    for name in ("lambada_a.jsonl", "lambada_b.jsonl"):
        (tmp_path / name).write_text(GOOD)
    with pytest.raises(UserError, match=r"has lambada_a.jsonl and lambada_b.jsonl: expected one file"):
        read_task("lambada", tmp_path)
    with pytest.raises(UserError, match=r"cannot read .*absent.jsonl: No such file"):
        read_task(str(tmp_path / "absent.jsonl"))
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=r"bad.txt is not valid UTF-8"):
        read_task(str(tmp_path / "bad.txt"))
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(UserError, match=r"holds no text"):
        read_task(str(tmp_path / "empty.txt"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'attention-residuals\[data\]'"):
        read_task("lambada")


def test_a_hub_out_of_reach_is_one_sentence(hub, monkeypatch):
    def fail(*_, **__):
        raise ConnectionError("no route\nmore")

    monkeypatch.setattr(sys.modules["datasets"], "load_dataset", fail)
    with pytest.raises(UserError, match=r"task lambada cannot be read from .*lambada_openai on the hub \(no route\)"):
        read_task("lambada")


@needs_data
@pytest.mark.parametrize("name", list(TASKS))
def test_the_real_files_are_read(name):
    task = read_task(name, DATA)
    counts = {"lambada": 5153, "hellaswag": 10042, "wikitext2": 0}
    assert len(task.items) == counts[name]


@needs_data
def test_wikitext2_has_the_tokens_it_is_known_by():
    from attnres.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(DATA.parent / "tokenizers" / "gpt2")
    assert len(tokenizer.encode(read_task("wikitext2", DATA).text).ids) == 287_644
