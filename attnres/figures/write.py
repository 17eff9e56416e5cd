"""The list of all figures, and the functions that draw those that apply and write their files."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from attnres.errors import UserError, unknown
from attnres.figures import style
from attnres.figures.comparison import (
    Comparison,
    Variant,
    difference,
    final_difference,
    held_out_loss,
    learning_rates,
    train_loss,
)
from attnres.figures.depth import CHOICE, MAGNITUDES, QUANTITIES, by_depth, dynamics, over_steps, source_norms
from attnres.figures.geometry import keys, learned, queries
from attnres.figures.patterns import at_boundaries, by_kind, label_sources, layers, mixing, patterns
from attnres.figures.plot import NotShown, Plot
from attnres.figures.tokens import stacked, token_map
from attnres.inspect.inspection import By
from attnres.text import listed

if TYPE_CHECKING:
    from attnres.inspect.inspection import Inspection


@dataclass(frozen=True)
class Figure:
    """One of the figures that can be drawn.

    Attributes:
        draw: makes a plot of an `Inspection`; if `needs` is set, of a `Comparison` of the variants that have it.
        needs: the field of `Variant` that the figure draws.
        section: section of the report's page (`SECTIONS` in `attnres.report.sections`); without one the page omits it.
        paper: whether `attnres figures` writes it.
        mean: whether it shows means over seeds, which its caption then says; otherwise it shows the first seed.
        folded: title of the collapsible part of the page that it is in; by default, for a figure of one variant, the
            variant's.
        by: whether it can be drawn by contribution or by weight.
        each: whether it has a panel for each variant; the page omits controls that are mathematically the baseline.
    """

    name: str
    draw: Callable[..., Plot]
    needs: str = ""
    section: str = ""
    paper: bool = True
    mean: bool = False
    folded: str = ""
    by: bool = False
    each: bool = False

    def asked(self, by: By) -> dict[str, By]:
        """Return the keyword argument that selects contributions or weights, if the figure takes one."""
        return {"by": by} if self.by else {}

    def compared(self, comparison: Comparison, by: By = "contribution") -> Plot:
        """Draw the figure for the variants that have the field it needs. Raises NotShown."""
        plot = self.draw(comparison, **self.asked(by))
        return noted(plot, comparison.variants, mean=True) if self.mean else plot


def noted(plot: Plot, variants: Sequence[Variant], mean: bool) -> Plot:
    """Return the plot with a remark on seeds at the end of its caption, if there are several."""
    seeds = {tuple(map(str, one.seeds)) for one in variants}
    if max(map(len, seeds)) <= 1:
        return plot
    first, *others = seeds
    note = "Means over seeds." if others else f"Mean over seeds {listed(first)}." if mean else f"Seed {first[0]}."
    return dataclasses.replace(plot, caption=f"{plot.caption} {note}")


def _alone(key: str, section: str) -> Figure:
    """Return a figure of one quantity by depth, for the page; a paper has several quantities in a figure."""
    name = key.replace("_", "-")
    draw = partial(by_depth, keys=(key,), name=name, title=QUANTITIES[key].axis)
    return Figure(name, draw, "seeds", section, paper=False)


FIGURES = (
    Figure("patterns", patterns, by=True),
    Figure("boundaries", at_boundaries, by=True),
    Figure("held-out-loss", held_out_loss, "held_out", "Training"),
    Figure("train-loss", train_loss, "train", "Training"),
    Figure("difference", difference, "held_out", "Training"),
    Figure("final-difference", final_difference, "differences", "Training"),
    Figure("learning-rates", learning_rates, "finals", "Training"),
    Figure(
        "patterns",
        partial(patterns, narrow=True),
        section="Contributions to each layer's input",
        paper=False,
        mean=True,
    ),
    Figure(
        "patterns-weight",
        partial(patterns, by="weight", narrow=True),
        section="Contributions to each layer's input",
        paper=False,
        mean=True,
        folded="Weights",
    ),
    *(_alone(key, "Magnitudes by depth") for key in MAGNITUDES),
    Figure("mixing", mixing, "inspections", "Contributions of every sublayer", mean=True, by=True, each=True),
    Figure("layers", layers, by=True),
    Figure("depth", partial(by_depth, keys=CHOICE, name="depth", title="reads by depth"), "inspections"),
    *(_alone(key, "How layers choose their sources") for key in CHOICE),
    Figure(
        "magnitudes",
        partial(by_depth, keys=MAGNITUDES[:2], name="magnitudes", title="magnitudes by depth"),
        needs="inspections",
    ),
    Figure("source-norms", source_norms, "inspections", "Size of the sources", mean=True),
    Figure("dynamics", dynamics, "held_out"),
    Figure("dynamics-steps", over_steps, "dynamics", "Training by depth", mean=True, each=True),
    Figure("kinds", by_kind, section="Contributions by kind of token", by=True),
    Figure("kinds-sources", label_sources, section="Contributions by kind of token", by=True),
    Figure("queries", queries, section="Similarity of the layers' queries"),
    Figure("keys", keys),
    Figure("learned", learned, section="Other learned parameters"),
    Figure("tokens", stacked, by=True),
    Figure("token-map", token_map, by=True),
)
"""All figures in drawing order. A new figure is a function and a line here."""


@dataclass
class Drawn:
    """The drawn plots, and (name, reason) of each figure that does not apply."""

    plots: list[Plot] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)

    def add(self, name: str, draw: Callable[[], Plot]) -> None:
        """Draw one figure in the shared style, or note why it does not apply."""
        try:
            with style.style():
                self.plots.append(draw())
        except NotShown as reason:
            self.left_out.append((name, str(reason)))

    def __add__(self, other: "Drawn") -> "Drawn":
        return Drawn(self.plots + other.plots, self.left_out + other.left_out)


def names_of_figures() -> list[str]:
    """Return the names of the figures that `attnres figures` writes."""
    return list(dict.fromkeys(figure.name for figure in FIGURES if figure.paper))


def draw_model(inspection: "Inspection", by: By = "contribution", only: Collection[str] = ()) -> Drawn:
    """Draw the figures of one model, all or those named in `only`; `by` chooses contributions or weights.

    >>> plots = draw_model(inspection).plots  # doctest: +SKIP
    """
    drawn = Drawn()
    for figure in FIGURES:
        if figure.paper and not figure.needs and (not only or figure.name in only):
            drawn.add(figure.name, partial(figure.draw, inspection, **figure.asked(by)))
    return drawn


def draw_comparison(comparison: Comparison, by: By = "contribution", only: Collection[str] = ()) -> Drawn:
    """Draw the figures of models or runs side by side (or of one) that have the numbers for them, all or those named in
    `only`."""
    drawn = Drawn()
    for figure in FIGURES:
        is_asked = figure.paper and figure.needs and (not only or figure.name in only)
        if is_asked and (having := comparison.having(figure.needs)).variants:
            drawn.add(figure.name, partial(figure.compared, having, by))
    return drawn


def check_formats(formats: Sequence[str]) -> None:
    """Raise UserError for an unknown image format, or for none."""
    for name in formats:
        if name not in style.FORMATS:
            raise unknown("image format", name, style.FORMATS)
    if not formats:
        raise UserError(f"no image format given: expected some of {', '.join(style.FORMATS)}")


def save_all(plots: Sequence[Plot], out: Path | str, formats: Sequence[str] = ("pdf", "png")) -> list[Path]:
    """Write figures as `out/NAME.FORMAT`, each whole or not at all. Raises UserError."""
    check_formats(formats)
    written = []
    for plot in plots:
        for kind in formats:
            path = Path(out) / f"{plot.name}.{kind}"
            style.save(plot.figure, path, dpi=300)
            written.append(path)
    return written


def write_figures(
    inspection: "Inspection", out: Path | str, formats: Sequence[str] = ("pdf", "png"), by: By = "contribution"
) -> list[Path]:
    """Draw the figures of a model and write them into `out`; figures that do not apply are left out.

    Args:
        inspection: the model's measurements.
        out: the folder, created if missing.
        formats: any of pdf, png and svg.
        by: which numbers of sources are shown, contributions or weights.

    Returns:
        The files. The same inspection gives the same bytes.

    Raises:
        UserError: an unknown format, or a file cannot be written.
    """
    check_formats(formats)
    comparison = draw_comparison(Comparison.of_models([inspection]), by)
    return save_all([*draw_model(inspection, by).plots, *comparison.plots], out, formats)
