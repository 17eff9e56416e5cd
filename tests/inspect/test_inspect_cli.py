"""`attnres inspect`: tables a user can read, files, and one sentence for each mistake."""

import json

import pytest

from attnres import cli
from attnres.inspect.inspection import Inspection

TEXT = "The quick brown fox jumps over a lazy dog while seven wizards box up jugs of liquid zinc."


@pytest.fixture
def run(capsys):
    """(exit status, stdout, stderr) of attnres inspect."""

    def run(*arguments):
        capsys.readouterr()  # what making the model said
        code = 0
        try:
            cli.main(["inspect", *map(str, arguments), "--no-progress"])
        except SystemExit as left:
            code = left.code
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.mark.parametrize("residual", ["block", "full", "standard", "denseformer", "hyper_connections", "deepnorm"])
def test_a_text_is_shown_read_by_read(run, folder_of, residual):
    code, out, err = run(folder_of(residual), "--text", TEXT, "--context", "20")
    assert (code, err) == (0, "")
    assert f"residual {residual}" in out and "attention 2" in out and "output" in out
    assert "it was read in" in out, "longer than a window"
    if residual == "deepnorm":
        assert "weighs no sources" in out
    else:
        assert "sentence start" in out, "the example, token by token"


def test_figures_and_files_are_written(run, folder_of, tmp_path, monkeypatch):
    import attnres.figures

    def write_figures(inspection, out, formats=("pdf", "png")):
        assert isinstance(inspection, Inspection)
        return [out / "weights.pdf"]

    monkeypatch.setattr(attnres.figures, "write_figures", write_figures, raising=False)
    out = tmp_path / "out"
    options = ["--prune", "--threshold", "0.3", "--knock-out", "embedding", "block1@output", "--attribute"]
    code, said, err = run(folder_of("block"), "--text", TEXT[:40], "--out", out, *options)
    assert (code, err) == (0, "")
    found = Inspection.load(out / "inspection.json")
    assert found.example["text"] == TEXT[:40] and found.data["windows"] == 1
    prune, knocked, edges = (json.loads((out / f"{n}.json").read_text()) for n in ("prune", "knock_out", "attribution"))
    assert prune["mean"]["edges"] and prune["mean"]["difference"] != 0
    assert [row["knock_out"] for row in knocked] == ["embedding", "block1@output"]
    assert edges["reads"][-1] == "output"
    assert "attribution.json; figures: 1" in said and "rank correlation" in said and "weight × rms" in said


def test_a_corpus_has_errors_over_documents_and_no_token_list(run, folder_of, tmp_path):
    for i in range(6):
        (tmp_path / f"{i}.txt").write_text(f"{TEXT} {TEXT[: 10 * i]}")
    code, out, _ = run(folder_of("full"), "--corpus", tmp_path, "--knock-out", "embedding@mlp", "--limit", "400")
    assert code == 0 and "6 documents" in out and "standard error over documents" in out
    assert "loss of the next" not in out


def test_a_limit_is_said(run, folder_of):
    code, out, _ = run(folder_of("full"), "--text", TEXT, "--limit", "10")
    assert code == 0 and "stopped after 10 tokens, see --limit" in out


def test_characters_the_tokenizer_has_never_seen_are_read(run, folder_of):
    code, out, err = run(folder_of("full"), "--text", "漢字 🦊 \udcff é")
    assert (code, err) == (0, "") and "漢" in out


def test_a_file_is_a_text(run, folder_of, tmp_path):
    path = tmp_path / "a.md"
    path.write_text(TEXT)
    code, out, _ = run(folder_of("full"), "--file", path)
    assert code == 0 and str(path) in out


@pytest.mark.parametrize(
    ("residual", "arguments", "message"),
    [
        ("full", ["--text", ""], "the text is empty"),
        ("full", ["--text", " \n"], "the text is empty"),
        ("full", ["--text", "e"], "the text is a single token"),
        ("full", [], "there is no text to look at: give --text TEXT, --file FILE or --corpus SOURCE"),
        ("full", ["--text", "a b", "--file", "x"], "both --text and --file are given"),
        ("full", ["--file", "/absent.txt"], "/absent.txt cannot be read: No such file"),
        ("full", ["--file", "/"], "a folder of texts is a --corpus"),
        ("full", ["--corpus", "/absent"], "source '/absent' does not exist"),
        ("full", ["--text", TEXT, "--context", "33"], "context is 33 tokens: expected 2 to 32"),
        ("full", ["--text", TEXT, "--limit", "1"], "limit is 1 tokens: expected at least 2"),
        ("full", ["--text", TEXT, "--batch-tokens", "0"], "batch_tokens is 0"),
        ("full", ["--text", TEXT, "--knock-out", "embeding"], "did you mean 'embedding'?"),
        ("full", ["--text", TEXT, "--knock-out", "embedding@mpl 1"], "unknown read 'mpl 1': did you mean 'mlp 1'?"),
        ("full", ["--text", TEXT, "--knock-out", "@output"], "expected SOURCE or SOURCE@READ"),
        ("full", ["--text", TEXT, "--prune", "--threshold", "2"], "threshold is 2.0"),
        ("full", ["--corpus", "stdlib", "--attribute"], "give it with --text or --file"),
        ("standard", ["--text", TEXT, "--prune"], "residual 'standard' learns no weights"),
        ("deepnorm", ["--text", TEXT, "--knock-out", "embedding"], "deepnorm"),
        ("plain", ["--text", TEXT], "is a plain qwen3 model without depth reads"),
    ],
)
def test_a_mistake_is_one_sentence_and_status_2(run, folder_of, residual, arguments, message):
    code, _, err = run(folder_of(residual), *arguments)
    assert code == 2 and message in err and err.startswith("attnres: error: ")
    assert len(err.splitlines()) == 1 and "Traceback" not in err


def test_a_folder_that_is_no_model_is_one_sentence(run, tmp_path):
    code, _, err = run(tmp_path, "--text", TEXT)
    assert code == 2 and "holds no model" in err
