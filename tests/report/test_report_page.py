"""The page: whole, self-contained, escaped; figures that hold what the runs say."""

import csv
import html
import json
import re
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from synthetic import write_run, write_study

from attnres.errors import UserError
from attnres.figures import style
from attnres.figures.plot import canvas
from attnres.inspect.colours import source_colours
from attnres.report import load_study
from attnres.report.columns import COLUMNS
from attnres.report.page import write_report
from attnres.report.sections import comparison_of, sections
from attnres.report.table import build_table
from attnres.residuals import RESIDUALS, columns, make_residual, traits_of

VOID = {"meta", "br", "img", "link", "hr", "input"}


class Checker(HTMLParser):
    """Every tag is closed, ids are unique, and nothing is loaded from anywhere."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.loads = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href") and not (value or "").startswith(("#", "data:")):
                self.loads.append(value)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def page_of(folder):
    write_report(load_study(folder), folder)
    text = (folder / "report.html").read_text()
    checker = Checker()
    checker.feed(text)
    assert not checker.open
    assert len(checker.ids) == len(set(checker.ids))
    assert not checker.loads
    assert "@import" not in text
    assert "<script" not in text
    assert not re.search(r"url\((?!#)", text)
    return text


def test_the_page_is_about_the_runs_of_its_folder_alone(tmp_path):
    """A short comparison at `nano`, of which the project has longer ones of its own."""
    for residual in ("standard", "block"):
        config = write_run(tmp_path, residual) / "config.json"
        assert json.loads(config.read_text())["model"]["size"] == "nano"
    text = page_of(tmp_path)
    assert "docs/results" not in text and "10.2 M" not in text
    assert "more training" not in text and "ten million" not in text


def test_a_comparison_makes_a_whole_page(tmp_path):
    text = page_of(write_study(tmp_path, layers=3))
    for part in ("full ends below standard by", "Held-out loss", "Difference to standard over training", "Environment"):
        assert part in text
    assert "block: weights of sources" in text and "full: weights of sources" in text
    assert text.count(">before attention</text>") == text.count(">before the MLP</text>") == 2
    # Losses, differences, weights, magnitudes, training by depth.
    assert text.count("<svg") == 2 + 2 + 2 + 3 + 1
    assert (tmp_path / "table.csv").read_text().startswith("label,")


@pytest.mark.long
def test_every_held_out_loss_is_a_line_with_its_difference_to_the_baseline_of_the_same_seed(tmp_path):
    study = load_study(write_study(tmp_path, layers=3))
    write_report(study, tmp_path)
    with (tmp_path / "curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(len(run.windows) for run in study.runs)
    runs = {(run.label, run.seed): run for run in study.runs}
    for row in rows:
        seed, step = int(row["seed"]), int(row["step"])
        losses, base = runs[row["label"], seed].windows[step], runs["standard", seed].windows[step]
        assert float(row["loss"]) == pytest.approx(losses.mean(), abs=1e-6)
        if row["label"] == "standard":
            assert row["difference"] == ""
        else:
            errors = (losses - base).std(ddof=1) / len(losses) ** 0.5
            assert float(row["difference"]) == pytest.approx((losses - base).mean(), abs=1e-6)
            assert float(row["difference_se_windows"]) == pytest.approx(errors, abs=1e-6)


def test_everything_is_escaped(tmp_path):
    folder = tmp_path / "<b>&amp"
    write_run(folder, "standard")
    write_run(folder, "block", label="<script>alert(1)</script>".replace("/", "_"))
    text = page_of(folder)
    assert "<script" not in text
    assert "<fast>" not in text
    assert "A &lt;fast&gt; &amp; wide CPU" in text


@pytest.mark.long
@pytest.mark.parametrize("stop", [None, 430, 0])
def test_one_variant_alone_makes_a_page(tmp_path, stop):
    write_run(tmp_path, "full", stop=stop, layers=2)
    text = page_of(tmp_path)
    assert ("Only full was trained" in text) == (stop is None)
    assert ("Contributions to each layer" in text) == (stop is None)


@pytest.mark.long
def test_several_seeds_make_a_page(tmp_path):
    text = page_of(write_study(tmp_path, ("standard", "block"), seeds=3, layers=2))
    assert "Mean over seeds 0, 1 and 2." in text
    assert "3 seeds" in text


@pytest.mark.long
def test_a_backslash_in_a_label_stays_one(tmp_path):
    write_run(tmp_path, "standard", layers=2)
    write_run(tmp_path, "block", label=r"block\g<1>\1", layers=2)
    assert r"block\g&lt;1&gt;\1: weights of sources" in page_of(tmp_path)


@pytest.mark.long
def test_a_dollar_in_a_label_begins_no_formula(tmp_path):
    write_run(tmp_path, "standard", layers=2)
    write_run(tmp_path, "block", label=r"$\oops{$", layers=2)
    text = page_of(tmp_path)
    body = text[text.index("<svg") :]
    # Losses, difference over training and at the end, magnitudes, training by depth.
    assert body.count(r">$\oops{$</text>") == 2 + 2 + 3 + 1


@pytest.mark.long
def test_the_page_claims_equal_conditions_only_where_they_are(tmp_path):
    equal = "the same initial shared weights, the same batches in the same order"
    assert equal in page_of(write_study(tmp_path / "equal", layers=2))
    text = page_of(write_study(tmp_path / "deepnorm", ("standard", "deepnorm"), layers=2))
    assert "the same initial shared weights (deepnorm's branches scaled down)" in html.unescape(text)
    folder = write_study(tmp_path / "unequal", ("standard", "block"), layers=2)
    path = folder / "block-seed0" / "config.json"
    path.write_text(path.read_text().replace("adamw", "muon"))
    text = page_of(folder)
    assert "not trained under equal conditions" in text
    assert "same initial" not in text
    assert "the same held-out windows for every variant" not in text
    assert "optim.optimizer" in text
    write_run(folder, "block", 1, layers=2)
    path.write_text(path.read_text().replace("muon", "adamw"))
    assert "same initial" not in page_of(folder)  # one variant has a seed that the other has not


@pytest.mark.long
def test_a_page_of_one_variant_compares_with_nothing(tmp_path):
    write_run(tmp_path, "full", layers=2)
    text = page_of(tmp_path)
    assert "for every variant" not in text
    assert "Loss on the training batches: an exponential mean" in text


def test_the_configuration_tells_seeds_apart_and_the_environment_has_its_ends_in_order(tmp_path):
    for seed, threads in enumerate((16, 2, 4)):
        folder = write_run(tmp_path, "full", seed, steps=200, layers=2)
        path = folder / "config.json"
        path.write_text(path.read_text().replace('"batch_size": 8', f'"batch_size": {8 + seed % 2}'))
        (folder / "environment.json").write_text(f'{{"threads": {threads}}}')
    text = page_of(tmp_path)
    assert '<th scope="row">batch_size</th><td>8, 9</td>' in text
    assert '<th scope="row">threads</th><td>2 … 16</td>' in text


@pytest.mark.long
def test_runs_without_routing_have_no_heatmap(tmp_path):
    text = page_of(write_study(tmp_path, ("standard", "rescaled")))
    assert "Contributions to each layer" not in text


@pytest.mark.long
def test_a_sweep_shows_loss_by_rate(tmp_path):
    for lr in (0.001, 0.01):
        write_run(tmp_path, "standard", label=f"standard-lr{lr:g}", lr=lr)
    assert "peak learning rate" in page_of(tmp_path)


def test_colours_follow_the_theme(tmp_path):
    text = page_of(write_study(tmp_path, ("standard", "block"), layers=2))
    body = text[text.index("<body>") :]
    for colour, name in ((traits_of("block").colour, "stroke: var(--c-0072b2)"), (style.INK, "fill: var(--ink)")):
        assert colour not in body and name in body
    standard = traits_of("standard").colour
    pair = f"stroke: {standard}; stroke: light-dark({standard}, {style.on_dark(standard)})"
    assert pair in body and body.count(standard) == 2 * body.count(f"light-dark({standard}, ")
    assert all(f"--{style.NAMES[colour]}:{dark};" in text for colour, dark in style.DARK.items())
    assert "prefers-color-scheme: dark" in text


def luminance(colour):
    """WCAG 2.2's relative luminance."""
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in to_rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("residual", [name for name in RESIDUALS if traits_of(name).colour])
def test_nine_lines_of_one_mechanism_are_seen_on_a_dark_page_and_told_apart(residual):
    looks = style.looks({label: (residual, traits_of(residual)) for label in "abcdefghi"}).values()
    colours = sorted({look["color"] for look in looks}, key=luminance)
    dark = [luminance(style.on_dark(colour)) + 0.05 for colour in colours]
    page = luminance(style.DARK[style.PAPER]) + 0.05
    assert all(line / page >= 3 for line in dark)
    assert all(more / less > 1.2 for less, more in pairwise(dark)), "a darker shade stays the darker"
    assert len({(style.on_dark(look["color"]), str(look["linestyle"])) for look in looks}) == 9


def test_every_source_is_seen_on_a_dark_page():
    page = luminance(style.DARK[style.PAPER]) + 0.05
    for residual in ("full", "block"):
        for colour in source_colours(columns(read.sources for read in make_residual(residual, 24, 8).layout())):
            assert (luminance(style.on_dark(colour)) + 0.05) / page >= 3


def test_places_on_a_scale_keep_their_colour_on_a_dark_page():
    with style.style():
        figure, axes = canvas(3.0, 1.0)
        axes[0, 0].plot([0, 1], [0, 1], color="#003f62")
        axes[0, 0].add_collection(PolyCollection([[(0, 0), (1, 0), (1, 1)]], facecolors="#440154"))
    svg = style.to_svg(figure, "x", "x", 1.0)
    assert "fill: #440154" in svg and svg.count("#440154") == 1
    assert f"stroke: #003f62; stroke: light-dark(#003f62, {style.on_dark('#003f62')})" in svg


@pytest.mark.long
def test_figures_are_written_as_files_when_asked(tmp_path):
    write_study(tmp_path, ("standard", "block"), layers=2)
    written = write_report(load_study(tmp_path), tmp_path, images="png")
    images = [path for path in written if path.suffix == ".png"]
    assert len(images) == 2 + 2 + 1 + 3 + 1
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in images)


@pytest.mark.long
def test_a_report_that_cannot_be_written_leaves_the_earlier_one(tmp_path, monkeypatch):
    write_study(tmp_path, ("standard", "block"), layers=2)
    before = page_of(tmp_path)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("attnres.files.os.fsync", full)
    with pytest.raises(UserError, match="No space left on device"):
        write_report(load_study(tmp_path), tmp_path)
    assert (tmp_path / "report.html").read_text() == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


# ------------------------------------------------------------------ what the figures hold


def plots_of(study):
    with style.style():
        return {plot.name: plot for section in sections(comparison_of(study)) for plot in section.every}


def lines_of(plot):
    return {line.get_label(): line for line in plot.figure.axes[0].get_lines() if not line.get_label().startswith("_")}


def test_curves_hold_the_measured_values(tmp_path):
    study = load_study(write_study(tmp_path, ("standard", "block")))
    plots = plots_of(study)
    for label, line in lines_of(plots["held-out-loss"]).items():
        run = study.of(label)[0]
        assert line.get_ydata() == pytest.approx([record["loss"] for record in run.val])
        assert line.get_xdata() == pytest.approx([record["step"] * 2048 for record in run.val])
        assert line.get_color() == run.traits.colour
    difference = lines_of(plots["difference"])["block"].get_ydata()
    assert difference[-1] == pytest.approx(
        study.of("block")[0].val[-1]["loss"] - study.of("standard")[0].val[-1]["loss"]
    )


def test_an_unknown_error_is_drawn_as_no_bar(tmp_path):
    plots = plots_of(load_study(write_study(tmp_path, ("standard", "block"), windows=1)))
    final = plots["final-difference"]
    assert [len(line.get_xdata()) for line in final.figure.axes[0].get_lines()[1:]] == [1]
    assert "No bar: the error is not known." in final.caption
    assert np.isfinite(plots["difference"].figure.axes[0].get_ylim()).all()


def test_magnitudes_have_a_point_for_every_sublayer(tmp_path):
    plots = plots_of(load_study(write_study(tmp_path, ("standard", "block"), layers=6)))
    assert len(lines_of(plots["compare-output-rms"])["block"].get_xdata()) == 12
    assert len(lines_of(plots["compare-input-rms"])["block"].get_xdata()) == 13
    last = plots["compare-input-rms"].figure.axes[0].get_lines()[-1]
    assert (last.get_marker(), last.get_xdata().tolist()) == ("D", [12])  # the output is no attention
    assert plots["compare-input-rms"].figure.axes[0].get_yscale() == "log"


def test_weights_are_those_of_the_mean_over_seeds(tmp_path):
    folder = write_study(tmp_path, ("standard", "full"), seeds=2, layers=3)
    path = folder / "full-seed1" / "inspection.json"
    inspection = json.loads(path.read_text())
    other = inspection["routing"]
    other["weights"][-1] = other["weights"][-1][::-1]
    path.write_text(json.dumps(inspection))
    plots = plots_of(load_study(folder))
    assert [name for name in plots if name.startswith("patterns")] == ["patterns-full"]
    before_mlp = plots["patterns-full"].figure.axes[1]
    assert [tick.get_text() for tick in before_mlp.get_yticklabels()] == ["layer 0", "layer 1", "layer 2", "output"]
    output = before_mlp.collections[0].get_array()[-len(other["sources"][-1]) :]
    both = np.array(other["weights"][-1])
    assert output.tolist() == pytest.approx(((both + both[::-1]) / 2).tolist(), abs=1e-5)


def test_a_page_has_contents_and_a_command_for_the_explorer(tmp_path):
    """Every link of the contents has its heading, and the headline's error stands beside the control's difference."""
    folder = write_study(tmp_path / "runs", layers=2, steps=200)
    text = page_of(folder)
    links = re.findall(r'<a href="#([^"]+)">([^<]+)</a>', text)
    assert [title for _, title in links] == re.findall(r'<h2 id="[^"]+">([^<]+)</h2>', text) and len(links) > 3
    assert {name for name, _ in links} <= set(re.findall(r'\bid="([^"]+)"', text))
    command = re.search(r"in the explorer: <code>(.*?)</code>", text)
    assert command is not None
    assert command[1].split() == [
        "attnres",
        "app",
        *(str(folder / f"{one}-seed0") for one in ("block", "full")),
        "--open",
    ]
    assert re.search(
        r"standard by [0-9.]+ ± [0-9.]+ \(placebo control: [+−][0-9.]+\) nats", text.replace("&nbsp;", " ")
    )


def test_speed_is_withheld_until_every_run_has_finished(tmp_path):
    for residual, stop in (("standard", None), ("block", 500)):
        write_run(tmp_path, residual, stop=stop)
    table = build_table(load_study(tmp_path))
    assert any("withheld" in note and "block not finished" in note for note in table.notes)
    columns = {column.name: column for column in COLUMNS}
    for name in ("tokens_per_s", "step_time_ratio"):
        assert columns[name].text(table.row("standard"), table) == "–"
