"""What the report shows of the runs' insides."""

import dataclasses
import html
import json
import re
from pathlib import Path

import numpy as np
import pytest
from synthetic import routing, write_study

from attnres.errors import UserError
from attnres.figures import Comparison, draw_model, style
from attnres.figures.plot import canvas
from attnres.inspect.inspection import Inspection
from attnres.report import load_study
from attnres.report.page import write_report
from attnres.report.sections import Section, comparison_of, example, sections
from attnres.report.table import build_table


def invented(residual: str, seed: int, layers: int = 3) -> Inspection:
    """An inspection of invented numbers of a model with `2 * layers` sublayers."""
    rng = np.random.default_rng(seed)
    reads = [*(f"{kind} {i}" for i in range(layers) for kind in ("attention", "mlp")), "output"]
    count = len(reads)
    measured = routing(residual, layers)
    weighs = measured is not None
    sources = measured["sources"] if measured else [["embedding", *reads[:i]] for i in range(count)]
    weights = measured["weights"] if measured else [[1.0] * len(row) for row in sources]
    mixing = np.tril(rng.uniform(0.1, 1, (count, count)))
    names, tokens = ["statement start", "identifier"], ["if", " <x>", "\n"]

    def varied(row: list[float]) -> list[float]:
        values = np.array(row) * (rng.uniform(0.5, 1.5, len(row)) if weighs else 1.0)
        return (values / values.sum()).tolist()

    kinds = [[varied(row) for row in weights] for _ in names]
    return Inspection(
        model={"name": residual, "residual": residual, "settings": {}, "num_sublayers": 2 * layers, "width": 8},
        data={"source": "invented", "documents": 2, "windows": 2, "tokens": 100, "context": 8, "kind": "code"},
        reads=reads,
        routing={
            "reads": reads,
            "sources": sources,
            "weights": weights,
            "contribution": [rng.dirichlet(np.ones(len(row))).tolist() for row in weights],
        },
        entropy={
            "nats": [0.1 * i for i in range(count)],
            "effective": [float(np.exp(0.1 * i)) + seed for i in range(count)],
            "most": [len(row) for row in sources],
        },
        mixing=mixing.tolist(),
        mixing_contribution=(mixing / mixing.sum(1, keepdims=True)).tolist(),
        distance=[float(i) for i in range(count)],
        persistence=[1 / (i + 1) for i in range(count)],
        sharpness=[None, *rng.uniform(1, 3, count - 1).tolist()] if weighs else None,
        query_cosine=np.eye(count).tolist() if weighs else None,
        query_pca=None,
        learned={"recency_bias": {"values": [0.1] * count, "axes": ["read"], "title": "bias"}}
        if residual == "block"
        else None,
        output_rms=[0.1 + seed] * (count - 1),
        input_rms=[0.1] * count,
        source_rms=[[0.5 + i for i in range(len(row))] if weighs else [] for row in sources],
        source_cosine=[[] for _ in sources],
        key_cosine=[],
        kinds={
            "kind": "code",
            "names": names,
            "tokens": [5, 7],
            "documents": [2, 2],
            **dict.fromkeys(("weights", "error", "contribution", "contribution_error"), kinds),
        },
        example={
            "text": "".join(tokens),
            "tokens": tokens,
            "ids": [1, 2, 3],
            "kinds": ["statement start", "identifier", "indentation"],
            "losses": [1.0, 2.0, None],
            "sources": sources,
            **{name: [[varied(row) for _ in tokens] for row in weights] for name in ("weights", "contribution")},
        },
    )


@pytest.fixture
def inspected(tmp_path: Path) -> Path:
    """Two seeds of a comparison, with an inspection in each run."""
    folder = write_study(tmp_path / "study", ("standard", "block", "full"), seeds=2, layers=3, steps=200)
    for run in folder.glob("*-seed*"):
        residual, seed = run.name.split("-seed")
        invented(residual, int(seed)).save(run / "inspection.json")
    return folder


def test_the_page_has_a_section_for_everything_inside(inspected: Path) -> None:
    write_report(load_study(inspected), inspected)
    text = (inspected / "report.html").read_text(encoding="utf-8")
    for title in (
        *("Contributions of every sublayer", "How layers choose their sources", "Size of the sources"),
        *(
            "Training by depth",
            "Contributions by kind of token",
            "Similarity of the layers' queries",
            "One text, token by token",
        ),
    ):
        assert f">{html.escape(title)}</h2>" in text
    assert "&lt;x&gt;</span>" in text and "<x>" not in text
    assert not re.search(r"(?:src|href)=\"(?!data:|#)", text) and "<script" not in text
    identifiers = re.findall(r'\bid="([^"]+)"', text)
    assert len(identifiers) == len(set(identifiers))


def drawn(folder: Path) -> list[Section]:
    with style.style():
        return sections(comparison_of(load_study(folder)))


@pytest.mark.long
def test_what_is_a_mean_over_seeds_says_so(inspected: Path) -> None:
    plots = {plot.name: plot for section in drawn(inspected) for plot in section.every}
    for name in ("compare-mixing", "compare-source-norms", "patterns-block", "patterns-weight-block"):
        assert plots[name].caption.endswith("Mean over seeds 0 and 1.")
    assert plots["kinds-block"].caption.endswith("Seed 0.")
    tops = {ax.get_ylim() for ax in plots["compare-source-norms"].figure.axes}
    assert len(tops) == 1  # one scale for all variants


@pytest.mark.long
def test_cells_without_a_value_are_no_paths_in_the_page(inspected: Path) -> None:
    (plot,) = next(section for section in drawn(inspected) if section.title == "Contributions of every sublayer").plots
    svg = style.to_svg(plot.figure, plot.name, "mixing", 1.0)
    count = len(invented("full", 0).reads)
    cells = re.findall(r'<path [^>]*style="fill: #[0-9a-f]{6}; stroke: var\(--paper\)', svg)
    assert len(cells) == 3 * count * (count + 1) // 2
    assert not re.search(r' d="[^"]*\.\d{3}', svg)
    assert "<pattern" not in svg, "each of its uses is an image where a browser prints"


def test_what_a_picture_says_is_text_and_no_markup() -> None:
    figure, axes = canvas(3.0, 1.0)
    axes[0, 0].set_title("#0072b2")
    svg = style.to_svg(figure, "x", 'a"><img src=x>', 1.0)
    assert 'aria-label="a&quot;&gt;&lt;img src=x&gt;"' in svg and "<img" not in svg


@pytest.mark.long
def test_every_figure_inside_has_a_file_of_its_own(inspected: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [plot.name for section in drawn(inspected) for plot in section.every]
    assert len(names) == len(set(names))
    assert {name for name in names if name.startswith("patterns")} == {
        *("patterns-standard", "patterns-block", "patterns-full", "patterns-weight-block", "patterns-weight-full")
    }, "a plain sum has contributions, and weights that are all alike"
    expected = {"mixing", "effective", "source-norms"}
    assert {f"compare-{name}" for name in expected} | {"kinds-block", "queries-full", "learned-block"} <= set(names)
    monkeypatch.setattr(style, "save", lambda figure, path: None)  # drawing them all takes long
    monkeypatch.setattr(style, "to_svg", lambda *_: "")
    written = {path.name for path in write_report(load_study(inspected), inspected, images="svg")}
    assert {f"{name}.svg" for name in names} <= written


def test_several_seeds_are_shown_as_their_mean(inspected: Path) -> None:
    (first, second) = (Inspection.load(inspected / f"block-seed{seed}" / "inspection.json") for seed in (0, 1))
    mean = next(one.mean for one in comparison_of(load_study(inspected)).variants if one.label == "block")
    assert mean.model["name"] == "block"
    assert mean.mixing is not None and first.mixing is not None and second.mixing is not None
    np.testing.assert_allclose(mean.mixing, (np.array(first.mixing) + second.mixing) / 2, rtol=1e-5)
    assert mean.sharpness is not None and mean.sharpness[0] is None


def test_runs_without_an_inspection_have_the_page_they_had(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "study", ("standard", "block"), layers=3, steps=200)
    write_report(load_study(folder), folder)
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "Contributions to each layer&#x27;s input" in text and "Magnitudes by depth" in text
    assert "How layers choose" not in text and "One text" not in text


@pytest.mark.long
def test_one_inspected_run_among_others_is_shown_alone(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "study", ("standard", "block"), layers=3, steps=200)
    invented("block", 0).save(folder / "block-seed0" / "inspection.json")
    seen = [one.label for one in comparison_of(load_study(folder)).variants if one.inspections]
    assert seen == ["block"]
    write_report(load_study(folder), folder)


@pytest.mark.quick("change1-*", "change8-*")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "is no inspection of format 1"),
        ({"reads": None}, "is damaged at reads"),
        ({"routing": {"reads": [], "sources": [], "weights": "x"}}, "is damaged at routing"),
        ({"routing": {"reads": ["output"], "sources": [["embedding"]], "weights": [[0.5, 0.5]]}}, "damaged at routing"),
        ({"sharpness": [1.0]}, "is damaged at sharpness"),
        ({"mixing": [["a"]]}, "is damaged at mixing"),
        ({"model": {}}, "is damaged at model"),
        ({"model": {"name": "a", "residual": "full", "traits": 3}}, "is damaged at model"),
        ({"kinds": {"names": ["a"]}}, "is damaged at kinds"),
        ({"example": {"text": "a"}}, "is damaged at example"),
    ],
)
def test_a_damaged_inspection_is_told_and_its_sections_are_left_out(
    inspected: Path, change: dict[str, object], message: str
) -> None:
    path = inspected / "block-seed0" / "inspection.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=message):
        Inspection.load(path)
    study = load_study(inspected)
    assert [run.inspection is None for run in study.of("block")] == [True, False]
    notes = build_table(study).notes
    assert [note for note in notes if message in note and "block-seed0/inspection.json" in note]
    drawn(inspected)


@pytest.mark.long
def test_an_inspection_of_another_version_is_read_for_what_it_has(inspected: Path) -> None:
    path = inspected / "block-seed0" / "inspection.json"
    values = json.loads(path.read_text())
    for name in ("entropy", "persistence", "output_rms", "input_rms", "source_rms", "key_cosine", "example", "losses"):
        del values[name]
    del values["learned"]
    path.write_text(json.dumps(values | {"later": [1, 2]}))
    stored = Inspection.load(path)
    assert stored.persistence is None and stored.output_rms == [] and stored.mixing is not None
    assert {plot.name for plot in draw_model(stored).plots} >= {"patterns", "kinds"}
    drawn(inspected)


def test_the_text_is_as_dark_as_the_source_that_differs_most_contributes() -> None:
    seen = invented("full", 0)
    assert seen.example is not None
    output = np.array(seen.example["contribution"][-1])
    column = output[:, output.std(0).argmax()]
    shown = [int(part) for part in re.findall(r"--w:(\d+)%", example(seen))]
    assert shown[-3:] == [round(65 * part / column.max()) for part in column]
    assert example(invented("standard", 0)) == ""  # the same for every token: nothing to see


def test_a_control_that_is_the_baseline_has_no_figures_in_the_open() -> None:
    """They are folded, and where each variant has a panel it has none, unless the baseline is not there."""
    comparison = Comparison.of_models([invented(residual, 0) for residual in ("standard", "rescaled", "block")])
    standard, rescaled, block = (one.label for one in comparison.variants)
    comparison = dataclasses.replace(comparison, baseline=standard)
    assert [one.label for one in comparison.once().variants] == [standard, block]
    assert Comparison(comparison.variants[1:], standard).once().variants == comparison.variants[1:]
    with style.style():
        parts = {part.title: part for part in sections(comparison)}
    patterns = parts["Contributions to each layer's input"]
    assert {plot.title.split(":")[0] for plot in patterns.plots} == {standard, block}
    (fold,) = (title for title in patterns.folded if title.startswith(rescaled))
    assert {plot.title.split(":")[0] for plot in patterns.folded[fold]} == {rescaled}
    (matrices,) = parts["Contributions of every sublayer"].plots
    assert {ax.get_title("left") for ax in matrices.figure.axes} - {""} == {standard, block}
