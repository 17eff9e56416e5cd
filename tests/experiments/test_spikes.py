"""Spikes of the embedding's weight: what is measured on runs whose weights are known, and what is written."""

import csv
import json
import shutil

import findings as command
import numpy as np
import pytest
import torch
from spike_figure import starts
from spike_files import beyond, save, table
from spikes import FindingsConfig, figures, findings, read_documents, same_token

from attnres.data import prepare
from attnres.errors import UserError
from attnres.figures import style
from attnres.figures.plot import NotShown
from attnres.inspect.kinds import KINDS
from attnres.models import build
from attnres.report import load_study

SIZE = {
    "family": "qwen3",
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 32,
}
DATA = {"tokenizer": "bpe:300", "seq_len": 24, "held_out": 0.4, "limit": None, "column": "text", "val_windows": 4}


def function(i):
    return (
        f"def name{i}(a, b):\n    c = a * {i} + b\n    if c > {i + 1}:\n        return c\n    print('text', a, b)\n" * 2
    )


def make_run(folder, residual, seed, source, settings):
    prepared = prepare(str(source), "bpe:300", held_out=0.4, progress=False)
    model = build(SIZE, residual, vocab_size=prepared.vocab_size, max_positions=24, seed=seed, settings=settings)
    with torch.no_grad():
        g = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=g))
            if name.endswith("residual.query"):
                parameter[-1].zero_()
    model.save_pretrained(folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(prepared.path / name, folder / "model")
    config = {"model": {"residual": residual}, "data": {"source": str(source), **DATA}, "seed": seed}
    for name, value in (
        ("config", config),
        ("summary", {"steps": 1}),
        ("data", {"tokenizer_sha256": prepared.header["tokenizer_sha256"]}),
    ):
        (folder / f"{name}.json").write_text(json.dumps(value))


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Runs of two seeds on Python source; the output's query is zero in each."""
    root = tmp_path_factory.mktemp("findings")
    (root / "text").mkdir()
    for i in range(24):
        (root / "text" / f"{i}.py").write_text(function(i))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNRES_CACHE", str(root / "cache"))
        for residual, settings in (
            ("block", {"num_blocks": 2}),
            ("full", {}),
            ("boundary", {"num_blocks": 2}),
            ("standard", {}),
        ):
            for seed in (0, 1):
                make_run(root / "runs" / f"{residual}-seed{seed}", residual, seed, root / "text", settings)
        yield root / "runs", findings(FindingsConfig([str(root / "runs")], documents=6, windows=2, device="cpu"))


@pytest.mark.long
def test_every_variant_with_weights_is_there(study):
    _, outcome = study
    assert (outcome["language"], outcome["start"], outcome["documents"]) == ("code", "statement start", 6)
    assert {v["label"]: [v["reads"][i] for i in v["boundaries"]] for v in outcome["variants"]} == {
        "block": ["attention 2", "output"],
        "boundary": ["attention 2", "output"],
        "full": [],
    }
    assert outcome["skipped"] == ["standard"]
    assert outcome["tokens"]["statement start"] > 30


@pytest.mark.long
def test_a_zero_query_has_no_spike(study):
    _, outcome = study
    for variant in outcome["variants"]:
        uniform = 1 / {"block": 3, "boundary": 3, "full": 9}[variant["label"]]
        assert variant["weights"]["statement start"]["mean"][-1] == pytest.approx(uniform, rel=1e-4)
        assert variant["spikes"]["other tokens"]["mean"][-1] == pytest.approx(0, abs=1e-6)
        assert abs(variant["spikes"]["other tokens"]["mean"][4]) > 1e-4
        assert variant["spikes"]["other tokens"]["se_seeds"][4] > 0


@pytest.mark.long
def test_the_spike_is_the_starts_weight_less_the_mean_of_the_others(study):
    """Held against the weights of every token, read one by one."""
    from attnres.inspect.recording import record
    from attnres.models import load

    folder, outcome = study
    config = FindingsConfig([str(folder)], documents=6, windows=2)
    language, documents = read_documents(load_study(folder).of("full"), config)
    assert language == "code"
    spikes = []
    for seed in (0, 1):
        model = load(folder / f"full-seed{seed}" / "model").eval()
        for document in documents:
            with record(model, tokens=True) as trace, torch.no_grad():
                model(input_ids=document.ids, use_cache=False)
            weight = trace.token_weights[5][..., 0]
            spikes.append((weight[document.kinds == 0].mean() - weight[document.kinds > 0].mean()).item())
    full = next(v for v in outcome["variants"] if v["label"] == "full")
    assert full["spikes"]["other tokens"]["mean"][5] == pytest.approx(np.mean(spikes), abs=1e-6)


@pytest.mark.long
def test_the_same_token_elsewhere_is_what_a_start_is_held_against(study):
    """Token by token, over those that are a start here and none there."""
    from attnres.inspect.recording import record
    from attnres.models import load

    folder, outcome = study
    _, documents = read_documents(load_study(folder).of("full"), FindingsConfig(documents=6, windows=2))
    of_seeds = []
    for seed in (0, 1):
        model = load(folder / f"full-seed{seed}" / "model").eval()
        of_documents = []
        for document in documents:
            with record(model, tokens=True) as trace, torch.no_grad():
                model(input_ids=document.ids, use_cache=False)
            weight = trace.token_weights[5][..., 0]
            total, shares = 0.0, 0.0
            for token in document.ids.unique():
                here = weight[(document.ids == token) & (document.kinds == 0)]
                there = weight[(document.ids == token) & (document.kinds > 0)]
                if len(here) and len(there):
                    share = len(here) * len(there) / (len(here) + len(there))
                    total, shares = total + share * (here.mean() - there.mean()).item(), shares + share
            if shares:
                of_documents.append(total / shares)
        of_seeds.append(np.mean(of_documents))
    full = next(v for v in outcome["variants"] if v["label"] == "full")
    assert full["spikes"]["same token"]["mean"][5] == pytest.approx(np.mean(of_seeds), abs=1e-6)


def test_a_weight_of_the_token_alone_has_no_spike_over_the_same_token():
    start, ids = np.array([True, False, True, False]), np.array([7, 7, 8, 9])
    weights = np.array([[0.4, 0.4, 0.9, 0.1], [0.5, 0.3, 0.9, 0.1]])
    assert same_token(weights, np.array([2, 3, 4, 5]), start, ids) == pytest.approx([0.0, 0.2])
    assert np.isnan(same_token(weights, np.ones(4), start, np.arange(4))).all()


@pytest.mark.long
def test_an_edge_removed_at_starts_of_the_last_read_changes_nothing_elsewhere(study):
    _, outcome = study
    for variant in outcome["variants"]:
        rows = {(row["reads"], row["at"]): row for row in variant["knock_outs"]}
        assert len(rows) == 8
        everywhere, starts = rows["all reads", "all tokens"], rows["all reads", "starts"]
        assert everywhere["starts"]["mean"] != starts["starts"]["mean"]
        assert everywhere["starts - other tokens"]["se_documents"] > 0
        if variant["largest"].get("boundary", {}).get("read") == "output":
            assert rows["output", "starts"]["other tokens"]["mean"] == pytest.approx(0, abs=1e-5)


def test_figures_leave_out_documents_without_such_tokens():
    values = np.array([[1.0, 3.0, np.nan], [2.0, 4.0, 6.0]])
    assert figures(values) == {
        "mean": 3.0,
        "se_documents": pytest.approx(np.sqrt((1 + 4 / 3) / 2), rel=1e-5),
        "se_seeds": 1.0,
    }
    assert figures(np.array([[1.0]])) == {"mean": 1.0, "se_documents": None, "se_seeds": None}


@pytest.mark.long
def test_kinds_of_a_window_are_those_of_the_document(study):
    """A window that begins inside a statement does not begin one."""
    folder, _ = study
    _, documents = read_documents(load_study(folder).of("full"), FindingsConfig(documents=6, windows=8))
    firsts = torch.cat([document.kinds[1:, 0] for document in documents if len(document.kinds) > 1])
    assert len(firsts) and (firsts != KINDS["code"].index("statement start")).any()


@pytest.mark.long
def test_the_command_writes_a_folder_for_each_comparison_and_one_picture(study, tmp_path, monkeypatch, capsys):
    folder, _ = study
    line = ["findings.py", str(folder), "--out", str(tmp_path), "--documents", "4", "--windows", "1", "--device", "cpu"]
    monkeypatch.setattr("sys.argv", line)
    command.main()
    assert "largest spike, boundary" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "starts.pdf", "starts.png"}
    assert (tmp_path / "runs" / "findings.json").is_file()


@pytest.mark.long
def test_files(study, tmp_path):
    _, outcome = study
    paths = save(outcome, tmp_path / "out")
    assert json.loads(paths[0].read_text()) == outcome
    rows = list(csv.DictReader(paths[1].read_text().splitlines()))
    assert {row["kind"] for row in rows} >= {"statement start", "spike over other tokens"}
    assert len(list(csv.DictReader(paths[2].read_text().splitlines()))) > 40
    assert "largest spike, boundary" in paths[3].read_text() == table(outcome)


@pytest.mark.long
def test_a_picture_with_a_panel_for_each_variant(study):
    _, outcome = study
    with style.style():
        plot = starts([outcome, outcome])
    titles = [ax.get_title(loc="left") for ax in plot.figure.axes]
    assert titles == ["code: block", "code: boundary", "code: full"] * 2
    points = plot.figure.axes[2].containers[0].lines[0].get_ydata()
    assert points[5] == outcome["variants"][2]["spikes"]["other tokens"]["mean"][5]
    assert "identifier" in plot.caption
    with pytest.raises(NotShown):
        starts([{**outcome, "variants": []}])


def test_reads_beyond_their_errors_are_counted():
    spike = {
        "mean": [0.0, 0.3, -0.2, 0.2, None],
        "se_documents": [0.0, 0.1, 0.03, 0.08, None],
        "se_seeds": [None, None, 0.04, 0.08, None],
    }
    assert beyond(spike) == (1, 1, 3)


@pytest.mark.long
def test_mistakes_are_told(study, tmp_path):
    folder, _ = study
    with pytest.raises(UserError, match="expected at least 4 documents"):
        findings(FindingsConfig([str(folder)], documents=2))
    with pytest.raises(UserError, match="no run"):
        findings(FindingsConfig([str(tmp_path)]))
