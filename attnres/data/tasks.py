"""Two made-up tasks whose answers are known and take several steps in a row, as text that a model can be trained on.

    task:composition    letters, and where named permutations lead from one to the next, two at a time:   2bPPePQdRPa
    task:arithmetic     nested sums and products modulo five with their values:   2((3+4)*2)4(1+(3*1))4

A character is a token with the tokenizer bpe:257. A document begins with the number of steps that each of its answers
takes, the length of a composition or the depth of nesting: a network that answers at once has to make them in its
depth. The permutations are the same everywhere, so that one step is soon known by heart; half of what a document of
one step holds are answers, for where nearly all is chance (pairs of a permutation with every document, questions apart)
a small model learns nothing in four million tokens. `task:NAME:COUNT` has so many documents.

Source: the idea of synthetic tasks for depth is Physics of Language Models 4.1's (Depo, Mano), compositions as words of
a group are those of state tracking (Merrill et al., The Illusion of State); the tasks are ours.
"""

import random
from collections.abc import Callable, Iterator

from attnres.errors import UserError, unknown

DOCUMENTS = 40_000
LETTERS, NAMES = "abcdefgh", "PQRS"
MODULUS = 5
STEPS = 6
"""The longest composition, and the deepest nesting."""
LENGTH = 24
"""Steps of a document in all, about."""


def _permutations() -> dict[str, dict[str, str]]:
    draw = random.Random("permutations")
    return {name: dict(zip(LETTERS, draw.sample(LETTERS, len(LETTERS)), strict=True)) for name in NAMES}


PERMUTATIONS = _permutations()


def composition(draw: random.Random, steps: int, count: int) -> str:
    """A letter, and so many times names of permutations with the letter to which they lead from the last."""
    text = letter = draw.choice(LETTERS)
    for _ in range(count):
        names = draw.choices(NAMES, k=steps)
        for name in names:
            letter = PERMUTATIONS[name][letter]
        text += "".join(names) + letter
    return text


def arithmetic(draw: random.Random, steps: int, count: int) -> str:
    """So many expressions of this depth, each with its value modulo five."""
    return "".join(_expression(draw, steps) for _ in range(count))


def _expression(draw: random.Random, depth: int) -> str:
    text, value = str(digit := draw.randrange(MODULUS)), digit
    for _ in range(depth):
        sign, digit = draw.choice("+*"), draw.randrange(MODULUS)
        text = f"({text}{sign}{digit})" if draw.random() < 0.5 else f"({digit}{sign}{text})"
        value = (value + digit if sign == "+" else value * digit) % MODULUS
    return f"{text}{value}"


TASKS: dict[str, Callable[[random.Random, int, int], str]] = {"composition": composition, "arithmetic": arithmetic}
"""Name -> so many answers of so many steps, in a row."""


def documents(spec: str) -> Callable[[], Iterator[str]]:
    """Return what begins a pass over the documents of `task:NAME[:COUNT]`, always the same. Raises UserError."""
    _, name, *rest = spec.split(":")
    make = _task(name)
    if len(rest) > 1 or not all(part.isdecimal() and int(part) > 1 for part in rest):
        raise UserError(f"source '{spec}': expected task:{name} or task:{name}:COUNT, a number of documents from 2")
    count = int(rest[0]) if rest else DOCUMENTS

    def read() -> Iterator[str]:
        for index in range(count):
            draw = random.Random(f"{name} {index}")
            steps = min(draw.randint(1, STEPS), draw.randint(1, STEPS))  # few first: many are learned on top of them
            yield f"{steps}{make(draw, steps, LENGTH // steps)}"

    return read


def problems(name: str, steps: int, count: int) -> list[tuple[str, str]]:
    """Beginnings of documents of so many steps up to an answer, one of the first four, with it; drawn apart from the
    documents. Raises UserError."""
    make = _task(name)
    draw = random.Random(f"{name} held out {steps}")
    texts = (f"{steps}{make(draw, steps, draw.randint(1, 4))}" for _ in range(count))
    return [(text[:-1], text[-1]) for text in texts]


def _task(name: str) -> Callable[[random.Random, int, int], str]:
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    return TASKS[name]
