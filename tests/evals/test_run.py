"""Whole evaluations: figures, notes, differences, files."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from rich.console import Console

from attnres import UserError
from attnres.evals import run
from attnres.evals.config import EvalConfig
from attnres.evals.run import evaluate, show
from attnres.evals.tasks import TASKS
from attnres.models import open_checkpoint

OWN = ("questions", "pairs", "contexts")
"""Files of a user's own."""


def go(models, data, tasks=tuple(TASKS), **options):
    models = tuple(str(model) for model in models)
    return evaluate(EvalConfig(models, tasks, data=str(data), device="cpu", **options), progress=False)


def figure(results, task, key):
    return next(f for f in results.record["tasks"][task]["figures"] if f["key"] == key)


@pytest.fixture(scope="module")
def both(folders, data):
    own = (str(data / f"{name}.jsonl") for name in OWN)
    return go([folders["block"], folders["full"]], data, (*TASKS, *own), window=32, batch_tokens=500)


def test_every_task_has_its_figures(both):
    keys = {task: [f["key"] for f in entry["figures"]] for task, entry in both.record["tasks"].items()}
    assert keys == {
        "wikitext2": ["perplexity_non_overlapping", "perplexity_sliding", "bits_per_byte"],
        "lambada": ["acc", "perplexity", "acc_first_token"],
        "hellaswag": ["acc", "acc_norm", "acc_per_token"],
        "questions": ["acc", "acc_norm"],
        "pairs": ["acc", "acc_norm"],
        "contexts": ["acc", "acc_norm"],
    }
    assert figure(both, "hellaswag", "acc")["chance"] == 0.25
    assert figure(both, "pairs", "acc")["chance"] == 0.5
    labels = [f["label"] for f in both.record["tasks"]["wikitext2"]["figures"]]
    assert labels[:2] == ["perplexity, non-overlapping windows of 32", "perplexity, sliding windows of 32 by 16"]
    for task in both.record["tasks"].values():
        for entry in task["figures"]:
            assert len(entry["values"]) == 2
            assert len(entry["differences"]) == 1
            assert entry["differences"][0]["paired"]


def test_perplexity_is_that_of_the_text(both, folders, data):
    from attnres.evals.tasks import read_task

    subject = open_checkpoint(folders["block"])
    model = subject.load()
    text = read_task("wikitext2", data).text
    ids = torch.tensor(subject.tokenizer(text)["input_ids"])
    losses = []
    for window in ids.split(32):
        with torch.no_grad():
            logits = model(input_ids=window[None]).logits[0]
        losses += torch.nn.functional.cross_entropy(logits[:-1].double(), window[1:], reduction="none").tolist()
    value = figure(both, "wikitext2", "perplexity_non_overlapping")["values"][0]
    assert value["value"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
    bits = figure(both, "wikitext2", "bits_per_byte")["values"][0]["value"]
    rows = [r for r in both.items["wikitext2"][0] if r["windows"] == "sliding"]
    scored = sum(r["tokens"] for r in rows)
    assert scored == len(ids) - 1
    share = scored / len(ids)  # of the bytes: the first token has no score
    assert bits == pytest.approx(-sum(r["logprob"] for r in rows) / math.log(2) / (share * len(text.encode())))


def test_accuracy_is_that_of_the_rows(both):
    rows = both.items["questions"][0]
    right = [int(np.argmax(row["logprobs"])) == row["gold"] for row in rows]
    assert figure(both, "questions", "acc")["values"][0]["value"] == np.mean(right)
    rows = both.items["lambada"][1]
    assert figure(both, "lambada", "acc")["values"][1]["value"] == np.mean([row["greedy"] for row in rows])
    expected = math.exp(-np.mean([row["logprobs"][0] for row in rows]))
    assert figure(both, "lambada", "perplexity")["values"][1]["value"] == pytest.approx(expected)


def test_a_model_against_itself_differs_by_nothing(folders, data):
    same = go([folders["block"], folders["block"]], data, ("wikitext2", "lambada", "hellaswag"), window=32)
    for task in same.record["tasks"].values():
        for entry in task["figures"]:
            assert entry["differences"][0]["value"] == 0
            assert entry["differences"][0]["standard_error"] == 0


@pytest.mark.long
def test_other_tokenizers_are_compared_only_where_that_means_something(folders, data):
    results = go([folders["block"], folders["other"]], data, ("wikitext2", "lambada", "hellaswag"), window=32)
    for key in ("perplexity_non_overlapping", "perplexity_sliding"):
        (entry,) = figure(results, "wikitext2", key)["differences"]
        assert (entry["value"], entry["reason"]) == (None, "different tokens: bits per byte compare, this does not")
    assert figure(results, "lambada", "acc_first_token")["differences"][0]["value"] is None
    assert figure(results, "wikitext2", "bits_per_byte")["differences"][0]["paired"] is False
    for task, key in (("lambada", "acc"), ("lambada", "perplexity"), ("hellaswag", "acc")):
        assert figure(results, task, key)["differences"][0]["paired"]
    output = printed(results)
    assert "WikiText-2, perplexity, sliding windows of 32 by 16: different tokens" in output
    assert "(unpaired)" in output


def printed(results):
    console = Console(record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        show(results.record, console)
        return console.export_text()


def test_the_table_names_everything(both, folders):
    output = printed(both)
    for words in ("perplexity, non-overlapping windows of 32", "accuracy, first token only", "difference", "chance"):
        assert words in output
    assert "block" in output
    assert f"full: {folders['full']}, " in output
    assert "residual full" in output


def test_what_does_not_fit_is_cut_or_left_out_and_said(folders, data, tmp_path):
    long = "jugs of liquid zinc " * 30
    rows = [{"query": long, "choices": ["a", "b"], "gold": 0}, {"query": "q", "choices": [long, "b"], "gold": 1}]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    results = go([folders["block"]], data, (str(tmp_path / "mine.jsonl"),))
    assert results.record["tasks"]["mine"]["notes"] == [
        [
            "1 of 2 items cut on the left to 64 tokens",
            "1 of 2 items left out: an answer alone is longer than 64 tokens",
        ]
    ]
    assert figure(results, "mine", "acc")["values"][0]["items"] == 1
    assert "left out" in printed(results)
    (tmp_path / "mine.jsonl").write_text(json.dumps(rows[1]) + "\n")
    with pytest.raises(UserError, match=r"no item of .* fits into the 64 tokens"):
        go([folders["block"]], data, (str(tmp_path / "mine.jsonl"),))


def test_limit_takes_the_first_items_and_windows(folders, data):
    results = go([folders["block"]], data, ("wikitext2", "hellaswag"), window=16, stride=4, limit=3)
    assert figure(results, "hellaswag", "acc")["values"][0]["items"] == 3
    assert figure(results, "wikitext2", "perplexity_non_overlapping")["values"][0]["items"] == 3
    rows = results.items["wikitext2"][0]
    assert sum(row["tokens"] for row in rows if row["windows"] == "sliding") == 47


def test_files_are_written_whole(both, tmp_path):
    items = both.save(tmp_path / "out" / "results.json")
    record = json.loads((tmp_path / "out" / "results.json").read_text())
    assert record["models"][0]["residual"] == "block"
    assert record["settings"]["window"] == 32
    assert record["environment"]["torch"] == torch.__version__
    rows = [json.loads(line) for line in items.read_text().splitlines()]
    assert items.name == "results.items.jsonl"
    assert {row["task"] for row in rows} == {*TASKS, *OWN}
    assert sum(row["task"] == "hellaswag" for row in rows) == 18
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["results.items.jsonl", "results.json"]


def test_results_that_were_cut_short_are_written_again(both, tmp_path, monkeypatch):
    out = tmp_path / "results.json"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("attnres.files.os.fsync", _stop_at(2))
        both.save(out)
    assert both.save(out).is_file() and "models" in json.loads(out.read_text())


def _stop_at(number):
    calls = iter(range(1, number))

    def stop(handle):
        if next(calls, None) is None:
            raise KeyboardInterrupt

    return stop


def test_ctrl_c_leaves_nothing(folders, data, tmp_path, monkeypatch, capsys):
    from attnres import cli

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "score", stop)
    out = tmp_path / "results.json"
    with pytest.raises(SystemExit) as left:
        cli.main(["eval", str(folders["block"]), "--data", str(data), "--tasks", "hellaswag", "--out", str(out)])
    assert left.value.code == 130
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"models": ()}, "no model given: expected attnres eval MODEL"),
        ({"tasks": ()}, "no task given: expected some of wikitext2, lambada"),
        ({"tasks": ("helaswag",)}, "unknown task 'helaswag': did you mean 'hellaswag'"),
        ({"tasks": ("hellaswag", "hellaswag")}, "task hellaswag is given twice"),
        ({"tasks": ("hellaswag",), "lm_eval_tasks": "x"}, "lm_eval_tasks is given and no task of lm-eval: name one as"),
        ({"limit": 0}, "limit is 0: expected a whole number, at least 1"),
        ({"window": 1}, "window is 1: expected a whole number, at least 2"),
        ({"window": 65}, "window is 65 and .* takes 64 tokens"),
        ({"window": 8, "stride": 9}, "stride is 9 and the window 8"),
        ({"batch_tokens": 0}, "batch_tokens is 0"),
        ({"device": "gpu"}, "device gpu does not exist"),
    ],
)
def test_bad_settings_are_one_sentence_before_any_model_is_loaded(folders, data, monkeypatch, options, message):
    monkeypatch.setattr("attnres.models.Checkpoint.load", lambda *_: pytest.fail("loaded"))
    config = {"models": (str(folders["block"]),), "tasks": ("hellaswag",), "data": str(data)} | options
    with pytest.raises(UserError, match=message):
        evaluate(EvalConfig(**config), progress=False)


def test_a_second_model_that_is_missing_is_found_before_the_first_is_loaded(folders, data, monkeypatch, tmp_path):
    monkeypatch.setattr("attnres.models.Checkpoint.load", lambda *_: pytest.fail("loaded"))
    with pytest.raises(UserError, match=r"does not exist"):
        go([folders["block"], tmp_path / "absent"], data)


def test_progress_says_where_it_is(folders, data, monkeypatch, capsys):
    monkeypatch.setattr("attnres.progress.LINES_EVERY", 0.0)
    config = EvalConfig((str(folders["block"]),), ("hellaswag",), data=str(data), batch_tokens=100)
    evaluate(config)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 2
    assert "100%  hellaswag" in lines[-1]
    assert "tokens/s  left 0 s" in lines[-1]


def test_names_are_shortened_but_told_apart(folders, data, tmp_path):
    for parent in ("a", "b"):
        shutil.copytree(folders["block"], tmp_path / parent / "model")
    output = printed(go([tmp_path / "a" / "model", tmp_path / "b" / "model"], data, ("hellaswag",)))
    assert "a/model" in output
    assert "b/model" in output
