"""Our scores are lm-eval's: the same local task, item by item."""

import copy
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import processors

from attnres import UserError
from attnres.evals.config import EvalConfig
from attnres.evals.run import evaluate
from attnres.evals.scoring import encode_pairs
from attnres.models import open_checkpoint

CHOICES = """\
task: our_{name}
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {file}}}}}
validation_split: validation
output_type: multiple_choice
doc_to_text: "{{{{query}}}}"
doc_to_target: gold
doc_to_choice: choices
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
WORDS = """\
task: our_lambada
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {file}}}}}
validation_split: validation
output_type: loglikelihood
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{' ' + continuation}}}}"
metric_list: [{{metric: perplexity, aggregation: perplexity}}, {{metric: acc}}]
"""


@pytest.fixture
def yaml(data, tmp_path, monkeypatch):
    """Our task files as tasks of lm-eval."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name in ("hellaswag_val", "questions", "pairs"):
        text = CHOICES.format(name=name, file=data / f"{name}.jsonl")
        (folder / f"{name}.yaml").write_text(text)
    (folder / "lambada.yaml").write_text(WORDS.format(file=data / "lambada_openai.jsonl"))
    return folder


PAIRS = [
    ("the lazy", " fox jumps"),
    ("the lazy \n", "fox"),
    ("", "fox"),
    ("", " fox"),
    ("", "<|endoftext|>the fox"),
    ("<|endoftext|>the lazy", " fox"),
    ("<|endoftext|>", "fox"),
    ("the <|endoftext|>", "lazy"),
]
"""Contexts and continuations: ordinary, empty, and with the token of the beginning written out."""


@pytest.mark.parametrize("around", ["$A", "<|endoftext|> $A", "<|endoftext|> $A <|endoftext|>"])
@pytest.mark.parametrize("bos", ["<|endoftext|>", None])
def test_contexts_and_special_tokens_are_lm_evals(folders, monkeypatch, around, bos):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    checkpoint = open_checkpoint(folders["plain"])
    tokenizer = copy.deepcopy(checkpoint.tokenizer)
    tokenizer.bos_token = bos
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=around, special_tokens=[("<|endoftext|>", tokenizer.eos_token_id)]
    )
    theirs = HFLM(pretrained=checkpoint.load(), tokenizer=tokenizer)
    requests = []
    monkeypatch.setattr(theirs, "_loglikelihood_tokens", lambda encoded, **_: requests.extend(encoded))
    theirs.loglikelihood([Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(PAIRS)])
    ours = encode_pairs(tokenizer, PAIRS)
    assert [(list(a), list(b)) for a, b in ours] == [(a, b) for _, a, b in requests]
    assert theirs.max_length == checkpoint.context


@pytest.mark.quick("block")
@pytest.mark.parametrize("model", ["block", "plain"])
def test_every_item_agrees_with_lm_eval(folders, data, yaml, model):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    pairs = {"hellaswag": "our_hellaswag_val", "lambada": "our_lambada"}
    pairs |= {str(data / f"{name}.jsonl"): f"our_{name}" for name in ("questions", "pairs")}
    checkpoint = open_checkpoint(folders[model])
    theirs = simple_evaluate(
        HFLM(pretrained=checkpoint.load(), tokenizer=checkpoint.tokenizer, batch_size=3),
        tasks=list(pairs.values()),
        task_manager=TaskManager(include_path=str(yaml), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    config = EvalConfig((str(folders[model]),), tuple(pairs), data=str(data), batch_tokens=300)
    ours = evaluate(config, progress=False)
    compared = 0
    for name, other in pairs.items():
        samples = sorted(theirs["samples"][other], key=lambda sample: sample["doc_id"])
        name = Path(name).stem
        rows = ours.items[name][0]
        assert len(samples) == len(rows)
        for sample, row in zip(samples, rows):
            expected = [float(answer[0]) for answer in sample["filtered_resps"]]
            np.testing.assert_allclose(row["logprobs"], expected, atol=1e-4, rtol=0)
            compared += len(expected)
        figures = {measure.key: measure.estimate()[0] for measure in ours.measures[name][0]}
        for key, value in theirs["results"][other].items():
            metric, _, kind = key.partition(",")
            if kind and not metric.endswith("_stderr"):
                assert figures[metric] == pytest.approx(value, rel=1e-5)
    assert compared == 9 * 4 + 9 * 4 + 9 * 2 + 11


@pytest.mark.long
def test_tasks_of_lm_eval_stand_beside_ours_and_are_paired(folders, data, yaml):
    models = (str(folders["block"]), str(folders["full"]))
    config = EvalConfig(
        models,
        (str(data / "questions.jsonl"), "lm-eval:our_questions"),
        lm_eval_tasks=str(yaml),
        limit=7,
        device="cpu",
    )
    tasks = evaluate(config, progress=False).record["tasks"]
    ours = {figure["key"]: figure for figure in tasks["questions"]["figures"]}
    theirs = {figure["key"]: figure for figure in tasks["lm-eval:our_questions"]["figures"]}
    for key in ("acc", "acc_norm"):
        assert theirs[key]["values"] == ours[key]["values"]
        assert theirs[key]["differences"] == ours[key]["differences"]


def test_an_unknown_task_of_lm_eval_is_named(folders, yaml):
    config = EvalConfig((str(folders["block"]),), ("lm-eval:our_qestions",), lm_eval_tasks=str(yaml))
    with pytest.raises(UserError, match="unknown lm-eval task 'our_qestions': did you mean 'our_questions'"):
        evaluate(config, progress=False)


def test_without_lm_eval_the_sentence_says_how_to_get_it(folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(UserError, match=r"need its library: pip install 'attention-residuals\[eval\]'"):
        evaluate(EvalConfig((str(folders["block"]),), ("lm-eval:piqa",)), progress=False)
