"""All figures that apply to a model, or to several side by side, as files."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from attnres.errors import UserError, unknown
from attnres.figures import style
from attnres.figures.depth import magnitudes, measures
from attnres.figures.dynamics import Curves, dynamics, over_steps
from attnres.figures.geometry import gates, keys, queries
from attnres.figures.mixing import layers, mixing
from attnres.figures.patterns import at_boundaries, by_kind, by_prompt, label_sources, patterns
from attnres.figures.plot import NotShown, Plot
from attnres.figures.tokens import stacked, token_map

if TYPE_CHECKING:
    from attnres.inspect.inspection import Inspection


@dataclass
class Drawn:
    """What was drawn, and for each figure that does not apply the reason: (name, reason)."""

    plots: list[Plot] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)

    def add(self, name: str, draw: Callable[[], Plot]) -> None:
        """Draw one figure in the shared style, or note why it does not apply."""
        try:
            with style.style():
                self.plots.append(draw())
        except NotShown as reason:
            self.left_out.append((name, str(reason)))


def draw_model(inspection: "Inspection") -> Drawn:
    """Every figure of one model."""
    drawn = Drawn()
    drawn.add("patterns", lambda: patterns(inspection))
    drawn.add("boundaries", lambda: at_boundaries(inspection))
    drawn.add("mixing", lambda: mixing([inspection]))
    drawn.add("layers", lambda: layers(inspection))
    drawn.add("depth", lambda: measures([inspection]))
    drawn.add("magnitudes", lambda: magnitudes([inspection]))
    drawn.add("queries", lambda: queries(inspection))
    drawn.add("keys", lambda: keys(inspection))
    drawn.add("gates", lambda: gates(inspection))
    drawn.add("tokens", lambda: stacked(inspection))
    drawn.add("token-map", lambda: token_map(inspection))
    drawn.add("kinds", lambda: by_kind(inspection))
    drawn.add("kinds-sources", lambda: label_sources(inspection))
    drawn.add("prompts", lambda: by_prompt(inspection))
    if inspection.dynamics:
        run = Curves(str(inspection.model["name"]), inspection.model["residual"], [], inspection.dynamics)
        drawn.add("dynamics-steps", lambda: over_steps([run]))
    return drawn


def draw_comparison(inspections: Sequence["Inspection"]) -> Drawn:
    """The figures that set several models side by side."""
    drawn = Drawn()
    drawn.add("compare-mixing", lambda: mixing(inspections))
    drawn.add("compare-depth", lambda: measures(inspections))
    drawn.add("compare-magnitudes", lambda: magnitudes(inspections))
    return drawn


def draw_dynamics(runs: Sequence[Curves]) -> Drawn:
    """The figures of training runs."""
    drawn = Drawn()
    drawn.add("dynamics", lambda: dynamics(runs))
    drawn.add("dynamics-steps", lambda: over_steps(runs))
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


def write_figures(inspection: "Inspection", out: Path | str, formats: Sequence[str] = ("pdf", "png")) -> list[Path]:
    """Draw all figures of a model that apply and write them into `out`; what does not apply is left out.

    Args:
        inspection: what was measured of the model.
        out: folder, made if it is missing.
        formats: of pdf, png and svg.

    Returns:
        The files. The same inspection gives the same bytes.

    Raises:
        UserError: an unknown format, or a file cannot be written.
    """
    check_formats(formats)
    return save_all(draw_model(inspection).plots, out, formats)
