"""Two made-up tasks whose answers are known and take several steps in a row, as text that a model can be trained on.

    task:composition    a permutation in pairs, and where k steps along it lead:   ca ab bd dc | a2>d b1>d c3>d
    task:arithmetic     nested sums, differences and products modulo ten:   ((3+4)*2)>4 (5-8)>7

A character is a token with the tokenizer bpe:257. The length of a composition and the depth of nesting say how many
steps an answer takes: a network that answers at once has to make them in its depth. `task:NAME:COUNT` has so many
documents.

Source: the idea of synthetic tasks for depth is Physics of Language Models 4.1's (Depo, Mano); the tasks are ours.
"""

import random
from collections.abc import Callable, Iterator

from attnres.errors import UserError, unknown

DOCUMENTS = 40_000
LETTERS = "abcdefgh"
STEPS = 4
"""The longest composition, and the deepest nesting."""
QUESTIONS = 6
"""Questions in a document."""
ANSWER = ">"
"""What stands before an answer, which is one character."""


def composition(draw: random.Random, steps: int | None = None) -> tuple[str, str]:
    """A permutation of the letters and one question, up to its `>`, and the answer."""
    images = _permutation(draw)
    question, answer = _along(images, draw, steps)
    return f"{_pairs(images, draw)} | {question}", answer


def arithmetic(draw: random.Random, depth: int | None = None) -> tuple[str, str]:
    """An expression up to its `>`, and its value modulo ten."""
    text, value = str(digit := draw.randrange(10)), digit
    for _ in range(draw.randint(1, STEPS) if depth is None else depth):
        sign, digit = draw.choice("+-*"), draw.randrange(10)
        left = draw.random() < 0.5
        a, b = (value, digit) if left else (digit, value)
        text = f"({text}{sign}{digit})" if left else f"({digit}{sign}{text})"
        value = {"+": a + b, "-": a - b, "*": a * b}[sign] % 10
    return text + ANSWER, str(value)


def _permutation(draw: random.Random) -> dict[str, str]:
    return dict(zip(LETTERS, draw.sample(LETTERS, len(LETTERS)), strict=True))


def _pairs(images: dict[str, str], draw: random.Random) -> str:
    return " ".join(draw.sample([letter + image for letter, image in images.items()], len(images)))


def _along(images: dict[str, str], draw: random.Random, steps: int | None) -> tuple[str, str]:
    count = draw.randint(1, STEPS) if steps is None else steps
    start = letter = draw.choice(LETTERS)
    for _ in range(count):
        letter = images[letter]
    return f"{start}{count}{ANSWER}", letter


def _document_of_composition(draw: random.Random) -> str:
    images = _permutation(draw)
    questions = (_along(images, draw, None) for _ in range(QUESTIONS))
    return f"{_pairs(images, draw)} | {' '.join(question + answer for question, answer in questions)}"


def _document_of_arithmetic(draw: random.Random) -> str:
    return " ".join("".join(arithmetic(draw)) for _ in range(QUESTIONS))


Problem = Callable[[random.Random, int | None], tuple[str, str]]
TASKS: dict[str, tuple[Problem, Callable[[random.Random], str]]] = {
    "composition": (composition, _document_of_composition),
    "arithmetic": (arithmetic, _document_of_arithmetic),
}
"""Name -> a problem of so many steps, and a document of problems."""


def documents(spec: str) -> Callable[[], Iterator[str]]:
    """Return what begins a pass over the documents of `task:NAME[:COUNT]`, always the same. Raises UserError."""
    _, name, *rest = spec.split(":")
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    if len(rest) > 1 or not all(part.isdecimal() and int(part) > 1 for part in rest):
        raise UserError(f"source '{spec}': expected task:{name} or task:{name}:COUNT, a number of documents from 2")
    count = int(rest[0]) if rest else DOCUMENTS
    make = TASKS[name][1]

    def read() -> Iterator[str]:
        for index in range(count):
            yield make(random.Random(f"{name} {index}"))

    return read


def problems(name: str, steps: int, count: int) -> list[tuple[str, str]]:
    """Problems of so many steps with their answers, which no training document was drawn with. Raises UserError."""
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    draw = random.Random(f"{name} held out {steps}")
    return [TASKS[name][0](draw, steps) for _ in range(count)]
