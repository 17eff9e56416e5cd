"""The made-up tasks: answers worked out again from the text alone, and text that is the same each time."""

import re

import pytest

from attnres.data import prepare
from attnres.data.sources import LENGTH, LETTERS, PERMUTATIONS, STEPS, TASKS, task_documents, task_problems
from attnres.errors import UserError


def composed(text):
    """Answers by their place, of a document of compositions: what has to stand there."""
    steps, letter, answers = int(text[0]), text[1], {}
    for start in range(2, len(text), steps + 1):
        for name in text[start : start + steps]:
            letter = PERMUTATIONS[name][letter]
        answers[start + steps] = letter
    return answers


def calculated(text):
    steps, answers = int(text[0]), {}
    for match in re.finditer(r"[(][-+*()0-9]*?[)](?=[0-9]([(]|$)|$)", text[1:]):
        assert match[0].count("(") == match[0].count(")") == steps
        answers[1 + match.end()] = str(eval(match[0], {"__builtins__": {}}) % 5)
    return answers


SOLVE = {"composition": composed, "arithmetic": calculated}


@pytest.mark.parametrize("name", SOLVE)
def test_every_answer_of_a_document_is_right(name):
    seen = set()
    for text in task_documents(f"task:{name}:200")():
        answers = SOLVE[name](text)
        assert len(answers) == LENGTH // int(text[0])
        assert {place: text[place] for place in answers} == answers
        seen.add(text[0])
    assert seen == set(map(str, range(1, STEPS + 1)))
    assert list(task_documents(f"task:{name}:3")()) == list(task_documents(f"task:{name}:3")())


@pytest.mark.parametrize("name", SOLVE)
def test_problems_end_before_an_answer(name):
    for steps in range(1, STEPS + 1):
        many = task_problems(name, steps, 50)
        assert all(text[0] == str(steps) and SOLVE[name](text + answer)[len(text)] == answer for text, answer in many)
        assert len({answer for _, answer in many}) > 3 and many == task_problems(name, steps, 50)


def test_each_name_is_a_permutation_of_its_own():
    assert all(sorted(one) == sorted(one.values()) == list(LETTERS) for one in PERMUTATIONS.values())
    assert len({tuple(one.values()) for one in PERMUTATIONS.values()}) == len(PERMUTATIONS)


def test_a_task_is_a_source_of_characters(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNRES_CACHE", str(tmp_path))
    prepared = prepare("task:composition:40", "bpe:257", held_out=0.2, progress=False)
    texts = list(task_documents("task:composition:40")())
    splits = prepared.header["splits"]
    assert splits["train"]["documents"] + splits["val"]["documents"] == 40
    tokens = splits["train"]["tokens"] + splits["val"]["tokens"]
    assert tokens == sum(len(text) + 1 for text in texts), "a character is a token"
    monkeypatch.setattr("attnres.data.sources.LENGTH", 12)  # another version of the task
    again = prepare("task:composition:40", "bpe:257", held_out=0.2, progress=False)
    assert again.header["splits"]["train"]["tokens"] < splits["train"]["tokens"], "not the text of before"


@pytest.mark.parametrize(
    "spec", ["task:compsition", "task:arithmetic:many", "task:arithmetic:1", "task:arithmetic:9:9"]
)
def test_mistakes_are_told(spec):
    with pytest.raises(UserError, match=r"did you mean 'composition'|expected task:arithmetic or"):
        task_documents(spec)
    assert set(TASKS) == {"composition", "arithmetic"}
