"""What studies of one question say at several sizes: a claim has to have the same sign at two of them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attnres.studies.design import Table
from attnres.studies.presets import PRESETS
from attnres.text import UNKNOWN, number

if TYPE_CHECKING:
    from attnres.studies.outcome import Outcome

RULE = (
    "Two gates for a claim: beyond the noise, and of the same sign at two sizes. What is decided at one size alone is "
    "a hint."
)


def at_sizes(outcomes: Sequence["Outcome"]) -> list[Table]:
    """A table a study that was carried out at several presets: each difference at each, and what they say together.

    Only what was held against the same baseline, in the same arm and under the same name, is one question. Two presets
    with one model are one size, for which the longer one stands.
    """
    by_study: dict[str, dict[str, Mapping[str, Any]]] = {}
    for one in sorted(outcomes, key=lambda one: list(PRESETS).index(one.setting.name)):
        by_study.setdefault(one.design.title, {})[one.setting.name] = one.result.values
    tables = []
    for title, of_presets in by_study.items():
        presets = {name: values for name, values in of_presets.items() if name == _longest(name, of_presets)}
        answers: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
        for preset, values in presets.items():
            for where, contrast in contrasts(values):
                baseline = contrast["baseline"]
                question = f"{where.removesuffix(baseline).strip()} minus {baseline}".strip()
                for label, one in contrast["variants"].items():
                    answers.setdefault((label, question), {})[preset] = one
        shared = {question: each for question, each in answers.items() if len(each) > 1}
        if shared:
            head = ["variant", "difference", *presets, "together"]
            rows = [
                [*question, *(_cell(each.get(preset)) for preset in presets), together(list(each.values()))]
                for question, each in shared.items()
            ]
            tables.append(Table(f"{title} · several sizes", head, rows, [RULE]))
    return tables


def _longest(name: str, presets: Iterable[str]) -> str:
    """Of the presets with the model of this one, which are one size, that with the most steps."""
    size = PRESETS[name].train["model"]
    return max((one for one in presets if PRESETS[one].train["model"] == size), key=lambda one: PRESETS[one].steps)


def contrasts(values: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The comparisons with a baseline among the values of a result, each with the names that lead to it."""
    if "baseline" in values and "variants" in values:
        yield where, values
        return
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from contrasts(value, f"{where} {name}".strip())


def together(answers: Sequence[Mapping[str, Any]]) -> str:
    """What the same question's answers at several sizes say.

    >>> better, open_ = {"verdict": "better", "difference": -0.04}, {"verdict": "undecided", "difference": -0.01}
    >>> together([better, better]), together([better, open_])
    ('better at 2 sizes', 'better at one, the same sign at the others')
    >>> together([better, better, open_ | {"difference": 0.01}])
    'better at 2 sizes, not of one sign at the others'
    >>> together([open_, open_]), together([better, open_ | {"difference": 0.01}])
    ('undecided', 'better at one, not of one sign')
    """
    decided = [str(one["verdict"]) for one in answers if one["verdict"] != "undecided"]
    if not decided:
        return "undecided"
    if len(set(decided)) > 1:
        return "of both signs"
    signs = {one["difference"] > 0 for one in answers}
    if len(decided) > 1:
        return f"{decided[0]} at {len(decided)} sizes{', not of one sign at the others' * (len(signs) > 1)}"
    return f"{decided[0]} at one, {'the same sign at the others' if len(signs) == 1 else 'not of one sign'}"


def _cell(answer: Mapping[str, Any] | None) -> str:
    if answer is None:
        return UNKNOWN
    return f"{number(answer['difference'], 4, signed=True)}, {answer['verdict']} ({answer['seeds']})"
