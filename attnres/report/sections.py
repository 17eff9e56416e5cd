"""The sections of the page that hold figures: which figures each has, and what is said above them."""

import dataclasses
from contextlib import suppress
from dataclasses import dataclass, field

from attnres.figures import FIGURES, Comparison, NotShown, Plot
from attnres.figures.patterns import differ
from attnres.figures.write import noted
from attnres.inspect.inspection import Inspection, by_in

SECTIONS = {
    "Training": "",
    "What each read is made of": (
        "How much of each sublayer's input each earlier output is: the projection of the weighted source on the read, "
        "averaged over held-out tokens. Rows sum to one; orange is what points against the read. The weights "
        "are folded below: a weight is not how much of a read a source is, since sources differ in length."
    ),
    "Magnitudes by depth": "How large values and gradients are along the depth.",
    "What each output is of each read": (
        "Contributions of blocks and partial sums, taken apart into what each sublayer wrote: so that a plain residual "
        "stands on the same scale as depth attention."
    ),
    "How reads choose, by depth": (
        "Over how many sources a read's weights spread, how far back they reach, what is left of the embedding (by "
        "contribution and by coefficient) and how strongly its query can choose, on the held-out windows."
    ),
    "How large the sources are": (
        "Keys are normed and values are not: a source that is large fills a read that hardly weighs it."
    ),
    "Training by depth": (
        "What each sublayer writes, the gradient that reaches it and how its read chooses, from the first steps."
    ),
    "What kinds of token read": (
        "Held-out tokens, told apart by what they are: what their reads are made of, compared with one another."
    ),
    "Which reads ask alike": (
        "The learned queries, compared with one another: two reads with like queries choose alike."
    ),
    "What is learned besides queries": (
        "Gates and biases of reads, or the coefficients of a residual that mixes without a softmax."
    ),
}
"""In the order of the page. Figures name theirs in `attnres.figures.write.FIGURES`."""


@dataclass(frozen=True)
class Section:
    """A heading, what is said under it, and figures; folded, by the title of their fold, those of which each variant
    has its own."""

    title: str
    lead: str
    plots: list[Plot] = field(default_factory=list)
    folded: dict[str, list[Plot]] = field(default_factory=dict)

    @property
    def every(self) -> list[Plot]:
        """All of its figures."""
        return [*self.plots, *(plot for plots in self.folded.values() for plot in plots)]


def sections(comparison: Comparison) -> list[Section]:
    """The sections for which there are figures; draw inside `style.style`."""
    result = {title: Section(title, lead) for title, lead in SECTIONS.items()}
    for figure in FIGURES:
        if not figure.section:
            continue
        section = result[figure.section]
        if figure.needs:
            having = comparison.having(figure.needs)
            with suppress(NotShown):
                if having.variants:
                    section.plots.append(figure.compared(having))
            continue
        for variant in comparison.having("inspections").variants:
            with suppress(NotShown):
                if figure.mean and _says_nothing(variant.mean, figure.folded):
                    continue
                plot = noted(figure.draw(variant.mean), [variant], mean=figure.mean)
                plot = dataclasses.replace(plot, name=f"{figure.name}-{slug(variant.label)}")
                fold = figure.folded or ("" if figure.mean else variant.label)
                (section.folded.setdefault(fold, []) if fold else section.plots).append(plot)
    return [section for section in result.values() if section.every]


def _says_nothing(inspection: Inspection, folded: str) -> bool:
    """Whether a plain sum's weights would be drawn, all alike, or those of a file without contributions twice."""
    by = by_in("contribution", inspection.routing)
    return not differ(inspection, "weight" if folded else by) or (bool(folded) and by == "weight")


def slug(label: str) -> str:
    """A label as part of a file's or an element's name."""
    return "".join(character if character.isalnum() else "-" for character in label)
