"""The made-up tasks: answers worked out again from the text alone, and text that is the same each time."""

import pytest

from attnres.data import prepare
from attnres.data.tasks import ANSWER, QUESTIONS, STEPS, TASKS, documents, problems
from attnres.errors import UserError


def composed(text):
    pairs, question = text.removesuffix(ANSWER).split(" | ")
    images = {pair[0]: pair[1] for pair in pairs.split()}
    assert sorted(images) == sorted(images.values())
    letter = question[0]
    for _ in range(int(question[1:])):
        letter = images[letter]
    return letter


def calculated(text):
    return str(eval(text.removesuffix(ANSWER), {"__builtins__": {}}) % 10)


@pytest.mark.parametrize(("name", "solve"), [("composition", composed), ("arithmetic", calculated)])
def test_every_answer_is_right(name, solve):
    for steps in range(1, STEPS + 1):
        many = problems(name, steps, 50)
        assert all(solve(text) == answer for text, answer in many)
        assert len({answer for _, answer in many}) > 3 and many == problems(name, steps, 50)
        if name == "arithmetic":
            assert all(text.count("(") == steps for text, _ in many)
        else:
            assert all(text[-2] == str(steps) for text, _ in many)


def test_documents_hold_questions_with_their_answers():
    for text in documents("task:arithmetic:20")():
        assert len(text.split()) == QUESTIONS
        assert all(calculated(one[:-1]) == one[-1] for one in text.split())
    for text in documents("task:composition:20")():
        pairs, questions = text.split(" | ")
        assert all(composed(f"{pairs} | {one[:-1]}") == one[-1] for one in questions.split())
    assert list(documents("task:composition:3")()) == list(documents("task:composition:3")())


def test_a_task_is_a_source_of_characters(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNRES_CACHE", str(tmp_path))
    prepared = prepare("task:composition:40", "bpe:257", held_out=0.2, progress=False)
    text = next(documents("task:composition:40")())
    splits = prepared.header["splits"]
    assert splits["train"]["documents"] + splits["val"]["documents"] == 40
    assert splits["train"]["tokens"] + splits["val"]["tokens"] == 40 * (len(text) + 1), "a character is a token"


@pytest.mark.parametrize(
    "spec", ["task:compsition", "task:arithmetic:many", "task:arithmetic:1", "task:arithmetic:9:9"]
)
def test_mistakes_are_told(spec):
    with pytest.raises(UserError, match=r"did you mean 'composition'|expected task:arithmetic or"):
        documents(spec)
    assert set(TASKS) == {"composition", "arithmetic"}
