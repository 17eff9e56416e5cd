"""`attnres figures`: models, files and runs to figures and captions, and one sentence for each mistake."""

import json

import pytest
from PIL import Image

from attnres import cli
from attnres.figures import draw
from attnres.figures import patterns as drawings
from attnres.figures.tokens import stacked
from attnres.figures.write import Drawn
from attnres.inspect.inspection import Inspection
from attnres.inspect.inspector import inspect_model

TEXT = "The quick brown fox jumps over a lazy dog while seven wizards box up jugs of liquid zinc."
STEPS = {"steps": [10, 20], "output_rms": [[1.0] * 6, [2.0] * 6]}


@pytest.fixture
def run(capsys, monkeypatch):
    """(exit status, stdout, stderr) of attnres figures, which here draws few figures of a model, as SVG."""

    def draw_model(seen, by, only=()):
        drawn = Drawn()
        drawn.add("patterns", lambda: drawings.patterns(seen, by))
        drawn.add("tokens", lambda: stacked(seen, by))
        return drawn

    monkeypatch.setattr(draw, "draw_model", draw_model)

    def run(*arguments):
        capsys.readouterr()
        code = 0
        try:
            cli.main(["figures", *map(str, arguments), "--no-progress", "--formats", "svg"])
        except SystemExit as left:
            code = left.code
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


@pytest.fixture(scope="module")
def saved(tmp_path_factory, make_model, tokenizer, documents):
    """The file of an inspection without an example."""
    path = tmp_path_factory.mktemp("saved") / "inspection.json"
    inspect_model(make_model(), tokenizer, documents, context=20, name="saved").save(path)
    return path


@pytest.mark.long
def test_the_folder_of_an_inspection_will_do_for_its_file(run, saved, tmp_path):
    code, out, err = run(saved.parent, tmp_path / "out")
    assert (code, err) == (0, "") and out.startswith("saved: patterns")


def test_a_model_and_a_file_are_drawn_and_set_side_by_side(run, folder_of, saved, tmp_path):
    code, out, err = run(folder_of("block"), saved, tmp_path / "out", "--text", TEXT)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "block: patterns, tokens"
    assert lines[1:3] == ["saved: patterns", "  without tokens: the inspection has no example text"]
    assert lines[3] == "side by side: compare-mixing, compare-depth, compare-magnitudes, compare-source-norms"
    assert lines[4].startswith("10 files in")
    files = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.*")}
    assert files >= {
        "captions.md",
        "block/captions.md",
        "block/patterns.svg",
        "saved/patterns.svg",
        "compare-depth.svg",
    }
    assert "**patterns. saved: contributions of sources.**" in (tmp_path / "out/saved/captions.md").read_text()


@pytest.mark.long
def test_a_run_has_its_dynamics_once(run, saved, tmp_path, monkeypatch):
    folder = tmp_path / "block-seed0"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model": {"residual": "block"}, "seed": 0}))
    depth = [{"kind": "depth", "step": step, "output_rms": STEPS["output_rms"][i]} for i, step in enumerate((10, 20))]
    losses = [{"kind": "val", "step": step, "loss": 1.0} for step in (10, 20)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*depth, *losses]))

    def seen(name, options):
        stored = Inspection.load(saved)
        stored.dynamics = STEPS
        return stored

    monkeypatch.setattr(draw, "_inspection", seen)
    code, out, err = run(folder, tmp_path / "out")
    assert (code, err) == (0, "")
    beside = ["mixing", "depth", "magnitudes", "source-norms"]
    runs = ["held-out-loss", "dynamics", "dynamics-steps"]
    assert out.splitlines()[0] == f"saved: {', '.join(['patterns', *beside, *runs])}"
    names = {"captions.md", "patterns.svg", *(f"{name}.svg" for name in [*beside, *runs])}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names, "all in one folder"


def test_a_mistake_is_one_sentence_and_writes_nothing(run, saved, folder_of, tmp_path):
    empty, old, broken = tmp_path / "empty", tmp_path / "old.json", tmp_path / "broken.json"
    empty.mkdir()
    old.write_text(json.dumps(json.loads(saved.read_text()) | {"format": 0}))
    broken.write_text(saved.read_text()[:100])
    out = tmp_path / "out"
    mistakes = [
        ([], "expected attnres figures MODEL [MORE ...] OUT"),
        ([saved], "expected attnres figures MODEL [MORE ...] OUT"),
        ([empty, out], "holds no runs"),
        ([tmp_path / "none.json", out], "cannot read"),
        ([old, out], "is no inspection of format 1"),
        ([broken, out], "is not valid JSON"),
        ([saved, old], "the last argument is the folder to write figures into, it is the file"),
        ([saved, tmp_path / "new.json"], "the last argument is the folder to write figures into"),
        ([saved, folder_of("block")], "holds a model: expected an empty folder or figures"),
        ([saved, old / "figures"], "is no folder that this user may write into"),
    ]
    for arguments, message in mistakes:
        code, output, err = run(*arguments)
        assert (code, output) == (2, ""), arguments
        assert message in err and err.count("\n") == 1, err
    assert not out.exists()


def test_one_figure_for_a_column_of_a_paper(saved, tmp_path, capsys):
    """Its width is exact in every format, text is text, fonts are in the PDF; the scale's ramp may be an image."""
    out = tmp_path / "out"
    asked = ["--only", "patterns", "--width", "3.3in", "--font", "8", "--formats", "png", "pdf", "svg"]
    cli.main(["figures", str(saved), str(out), *asked])
    assert {path.name for path in out.iterdir()} == {"captions.md", "patterns.png", "patterns.pdf", "patterns.svg"}
    with Image.open(out / "patterns.png") as image:
        assert image.width == round(3.3 * 300)
    pdf, svg = (out / "patterns.pdf").read_bytes(), (out / "patterns.svg").read_text()
    assert b"/MediaBox [ 0 0 237.6 " in pdf and b"/FontFile2" in pdf and pdf.count(b"/Subtype /Image") <= 1
    assert (
        'width="237.6pt"' in svg and ">L1 MLP<" not in svg and ">embedding</text>" in svg and svg.count("<image") <= 1
    )
    capsys.readouterr()
    mistakes = [
        (["--only", "pattern"], ("pattern", "patterns", "token-map")),
        (["--only", "learned"], ("learned", "gates")),
        (["--only", "train-loss"], ("train-loss",)),
        (["--width", "3.3 inches"], ("3.3 inches", "3.3in")),
        (["--width", "1mm"], ("1mm",)),
        (["--font", "80"], ("80", "24")),
    ]
    for arguments, words in mistakes:
        with pytest.raises(SystemExit) as left:
            cli.main(["figures", str(saved), str(tmp_path / "none"), *arguments])
        output = capsys.readouterr()
        assert left.value.code == 2 and not output.out and all(word in output.err for word in words), arguments
    assert not (tmp_path / "none").exists()
