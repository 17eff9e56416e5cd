"""`attnres inspect`: tables a user can read, files, and one sentence for each mistake."""

import io
import json
import re

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

from attnres import cli, load
from attnres.data.build import prepare
from attnres.data.shards import decoded
from attnres.errors import UserError
from attnres.inspect import attribute, logit_lens, patch
from attnres.inspect.config import InspectConfig
from attnres.inspect.edits import find_ablation, source_and_read
from attnres.inspect.inspection import Inspection
from attnres.inspect.look import look
from attnres.inspect.recording import find_residual
from attnres.inspect.subject import tokenizer_of
from attnres.models.encoding import piece, tokenise
from attnres.progress import wide
from attnres.text import visible

TEXT = "The quick brown fox jumps over a lazy dog while seven wizards box up jugs of liquid zinc."


@pytest.fixture
def run(capsys):
    """(exit status, stdout, stderr) of attnres inspect."""

    def run(*arguments):
        capsys.readouterr()  # what making the model output
        code = 0
        try:
            cli.main(["inspect", *map(str, arguments), "--no-progress"])
        except SystemExit as left:
            code = left.code
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


@pytest.mark.long
def test_what_is_learned_is_told_by_what_its_axes_count(run, folder_of, tmp_path):
    code, out, _ = run(folder_of("adaptive"), "--text", TEXT, "--context", "20", "--out", tmp_path)
    assert code == 0 and re.search(r"gate of a block's end: 0\.\d\d to 0\.\d\d over the layers", out)
    assert "temperature of the gates: 5.00" in out
    assert Inspection.load(tmp_path / "inspection.json").learned["temperature"]["values"] == 5.0


@pytest.mark.parametrize("residual", ["block", "full", "standard", "denseformer", "hyper_connections", "deepnorm"])
def test_a_text_is_shown_read_by_read(run, folder_of, residual):
    code, out, err = run(folder_of(residual), "--text", TEXT, "--context", "20")
    assert (code, err) == (0, "")
    assert f"residual {residual}" in out and "L2 attention" in out and "output" in out
    assert "it was read in" in out, "longer than a window"
    if residual == "deepnorm":
        assert "weighs no sources" in out
    else:
        assert "sentence start" in out, "the example, token by token"


def test_figures_and_files_are_written(run, folder_of, tmp_path, monkeypatch):
    import attnres.figures

    def write_figures(inspection, out, formats=("pdf", "png"), by="weight"):
        assert isinstance(inspection, Inspection) and by == "contribution"
        return [out / "weights.pdf"]

    monkeypatch.setattr(attnres.figures, "write_figures", write_figures, raising=False)
    out = tmp_path / "out"
    options = ["--prune", "--threshold", "0.3", "--knock-out", "embedding", "block1@output", "--attribute", "--graph"]
    code, output, err = run(folder_of("block"), "--text", TEXT[:40], "--out", out, *options)
    assert (code, err) == (0, "")
    stored = Inspection.load(out / "inspection.json")
    assert stored.example["text"] == TEXT[:40] and stored.data["windows"] == 1
    prune, knocked, edges = (json.loads((out / f"{n}.json").read_text()) for n in ("prune", "knock_out", "attribution"))
    assert prune["mean"]["edges"] and prune["mean"]["difference"] != 0
    assert [row["knock_out"] for row in knocked] == ["embedding", "block1@output"]
    following = knocked[0]["next_tokens"]
    assert len(following) == 5 and {"token", "id", "before", "after"} == set(following[0])
    assert edges["reads"][-1] == "output"
    assert (
        "attribution.json, edges.svg" in output
        and "figures: 1" in output
        and (out / "edges.svg").is_file()
        and "rank correlation" in output
        and "weight × rms" in output
    )

    code, output, _ = run(folder_of("block"), "--text", TEXT[:40], "--out", out)
    assert code == 0 and "from an earlier inspection: prune.json, knock_out.json, attribution.json" in output


def reads_that_lose(model, pair):
    """Names of the reads that an edit, which numbers them, takes a source from."""
    names = [read.name for read in find_residual(model).layout()]
    return [names[index] for index in find_ablation(*source_and_read(pair), model).reads]


def test_one_prediction_is_explained_from_another_text_and_by_the_lens(run, folder_of, tmp_path, monkeypatch):
    """What the options ask for is what the functions give, at the token that is named."""
    monkeypatch.setattr("attnres.figures.write_figures", lambda *args, **options: [])
    text, model = TEXT[:50], load(folder_of("block"))
    ids = tokenise(tokenizer_of(model), text)[0]
    first, second = (piece(tokenizer_of(model), one) for one in ids[3:5])
    other = " ".join(text.split()[:2] + ["a", *text.split()[2:]])
    options = ["--position", "14", "--target", first, "--against", second]
    code, out, err = run(
        folder_of("block"), "--text", text, "--attribute", "--patch", other, "--lens", *options, "--out", tmp_path / "o"
    )
    assert code == 0, err
    edges = attribute(model, ids, position=14, target=first, against=second)
    stored = json.loads((tmp_path / "o" / "attribution.json").read_text())
    assert stored["before"] == pytest.approx(edges.before, abs=1e-4)
    np.testing.assert_allclose(np.concatenate(stored["knockout"]), np.concatenate(edges.knockout), atol=1e-4)
    patching = patch(model, other, ids, position=14, target=first, against=second)
    stored = json.loads((tmp_path / "o" / "patching.json").read_text())
    assert stored["aligned"] == patching.aligned
    np.testing.assert_allclose(np.concatenate(stored["patched"]), np.concatenate(patching.patched), atol=1e-4)
    lens = logit_lens(model, ids, top=1, position=14, target=first)
    stored = json.loads((tmp_path / "o" / "lens.json").read_text())
    np.testing.assert_allclose(stored["target"], lens.target, atol=1e-4)
    for word in (f"“{visible(first)}” less that of “{visible(second)}”", "aligned by what both have", "logit lens"):
        assert word in out


@pytest.mark.parametrize("pair", ["embedding@attention", "EMBEDDING @ Attention"])
def test_of_all_attention_reads_only_those_with_a_choice_lose_a_source(make_model, pair):
    model = make_model("full")
    # without it attention 0 had no input at all
    assert reads_that_lose(model, pair) == ["attention 1", "attention 2"]
    assert reads_that_lose(model, "embedding@attention_0") == ["attention 0"]


def test_reads_of_one_sublayer_are_named_together_and_apart(make_model):
    model = make_model("muddformer")
    assert reads_that_lose(model, "embedding@attention2key") == ["attention 2 key"]
    together = reads_that_lose(model, "layer 0@Attention-2")
    assert together == [f"attention 2 {way}" for way in ("query", "key", "value", "stream")]
    with pytest.raises(UserError, match="unknown read 'attention 2 keys': did you mean 'attention 2 key'"):
        find_ablation(*source_and_read("embedding@attention 2 keys"), model)


def test_a_folder_that_cannot_be_written_is_found_before_anything_is_computed(run, folder_of, tmp_path):
    (tmp_path / "file").write_text("")
    refused = {
        tmp_path / "file": "is a file: expected a folder to write into",
        tmp_path / "file" / "below": "is no folder that this user may write into",
        folder_of("full"): "holds a model: expected an empty folder or an inspection",
    }
    for out, message in refused.items():
        code, output, err = run(folder_of("full"), "--text", TEXT, "--out", out)
        assert (code, output) == (2, "") and message in err


def test_what_a_token_holds_in_brackets_is_no_markup(capsys):
    table = Table()
    table.add_row("[/INST] [bold] :smile:")
    wide(None).print(table)
    assert "[/INST] [bold] :smile:" in capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 120])
def test_a_tokens_row_is_one_line(folder_of, width):
    printed = io.StringIO()
    console = Console(file=printed, width=width, force_terminal=True, color_system=None)
    inspection = look(InspectConfig(str(folder_of("full")), text=TEXT), console)
    rows = re.split(r"\n +token ", printed.getvalue())[1].splitlines()[1:][: len(inspection.example["tokens"])]
    assert all(re.search(r"\d\.\d\d *$", row) for row in rows) and max(map(len, rows)) <= width


def test_prepared_data_is_read_as_text_again(run, folder_of, tmp_path):
    (tmp_path / "text.jsonl").write_text(
        json.dumps({"text": "stream read stream"}) + "\n" + json.dumps({"text": "read it"})
    )
    prepare(tmp_path / "text.jsonl", str(folder_of("full")), out=tmp_path / "prepared")
    assert sorted(decoded(tmp_path / "prepared")) == ["read it", "stream read stream"]
    code, out, _ = run(folder_of("full"), "--corpus", tmp_path / "prepared", "--limit", "400")
    assert code == 0 and "2 documents" in out


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
    code, out, err = run(folder_of("full"), "--text", "漢字 🦊 é")
    assert (code, err) == (0, "") and r"\xe6" in out


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
        ("full", ["--text", "caf\udce9"], "the text is not valid UTF-8"),
        ("full", ["--text", "e"], "the text is a single token"),
        ("full", [], "there is no text to look at: give --text TEXT, --file FILE or --corpus SOURCE"),
        ("full", ["--text", "a b", "--file", "x"], "both --text and --file are given"),
        ("full", ["--file", "/absent.txt"], "cannot read /absent.txt: No such file"),
        ("full", ["--file", ""], "file is given and empty"),
        ("full", ["--corpus", " "], "an empty name was given"),
        ("full", ["--text", TEXT, "--out", ""], "out is given and empty"),
        ("full", ["--text", TEXT, "--knock-out", "embedding@atention"], "did you mean 'attention'?"),
        ("full", ["--file", "/"], "a folder of texts is a --corpus"),
        ("full", ["--corpus", "/absent"], "source '/absent' does not exist"),
        ("full", ["--text", TEXT, "--context", "33"], "context is 33 tokens: expected 2 to 32"),
        ("full", ["--text", TEXT, "--limit", "1"], "limit is 1 tokens: expected at least 2"),
        ("full", ["--text", TEXT, "--batch-tokens", "0"], "batch_tokens is 0"),
        ("full", ["--text", TEXT, "--knock-out", "embeding"], "did you mean 'embedding'?"),
        ("full", ["--text", TEXT, "--knock-out", "embedding@mpl 1"], "unknown read 'mpl 1': did you mean 'mlp 1'?"),
        ("full", ["--text", TEXT, "--knock-out", "@output"], "expected SOURCE or SOURCE@READ"),
        ("full", ["--text", TEXT, "--prune", "--threshold", "2"], "threshold is 2.0"),
        ("full", ["--text", TEXT, "--threshold", "nan"], "threshold is nan, which is of --prune alone"),
        ("full", ["--corpus", "stdlib", "--attribute"], "give it with --text or --file"),
        ("full", ["--corpus", "stdlib", "--lens"], "--lens looks at a prediction of one text"),
        ("full", ["--text", TEXT, "--position", "1"], "position is given, which is of --attribute"),
        ("full", ["--text", TEXT, "--lens", "--against", "a"], "against is given, which is of --attribute and --patch"),
        ("full", ["--text", TEXT, "--attribute", "--position", "999"], "position 999 in a text of"),
        ("full", ["--text", TEXT, "--attribute", "--target", TEXT], "tokens: give one"),
        ("full", ["--text", TEXT, "--patch", ""], "patch is given and empty"),
        ("full", ["--text", "a dog", "--patch", "a dog"], "both prompts give the same prediction"),
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
