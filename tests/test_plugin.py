"""A mechanism of a user's own is one file for every tool: two are written here, and go through all of them."""

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import NARROW
from transformers import Qwen3Config, Qwen3ForCausalLM

from attnres import UserError, cli
from attnres.app.opened import Opened
from attnres.app.page import Page
from attnres.app.state import Cut, View
from attnres.inspect import Ablate, Inspection, attribute, effect, intervene, prune_report, record
from attnres.inspect.edits import Reweigh
from attnres.models import build, export_model, load
from attnres.residuals import registry
from attnres.residuals.registry import PLUGINS
from attnres.training.config import from_dict
from attnres.training.prepare import prepare_run

MECHANISMS = '''
"""Two mechanisms of a user's own."""

import torch
from torch import nn

from attnres.residuals import Learned, Residual, Source, Traits
from attnres.residuals.settings import start_at


class Anchored(Residual):
    """h_l = x_l + a_l v_0 over the running sum x_l: every read holds on to the embedding. The a_l start at `anchor`."""

    name = "anchored"
    traits = Traits(False, sums_to_one=False, has_query=False, starts_standard=True, colour="#8a2be2")

    def __init__(self, num_sublayers, width, *, anchor: float = 0.0):
        super().__init__(num_sublayers, width)
        self.anchor = anchor
        self.traits = self.traits._replace(starts_standard=anchor == 0.0)
        self.weight = nn.Parameter(torch.empty(num_sublayers + 1))
        self.init_parameters()

    def init_parameters(self):
        nn.init.constant_(self.weight, self.anchor)

    def start(self, embedding):
        return embedding, embedding

    def read(self, state, index, norm):
        x, embedding = state
        return self.normed(x + self.weight[index].to(x.dtype) * embedding, index, norm), state

    def write(self, state, index, output):
        x, embedding = state
        return x + output, embedding

    def finish(self, state, norm):
        return self.read(state, self.num_sublayers, norm)[0]

    def hidden_state(self, state):
        return state[0]

    def implied(self, index):
        row = torch.ones(index + 1)
        row[0] += self.weight[index].detach().cpu().float()
        return row

    def learned(self):
        return {"weight": Learned(self.weight.detach().float().cpu(), ("read",), "weight of the embedding")}


class Gated(Residual):
    """h_l = sum_i s_{i->l} v_i,  s_{i->l} = sigmoid(b_{l,i} + w_l . v_i / rms(v_i)): a gate for each source and token.

    Queries w start at zero, biases b rise with the source by `slope` from -1 at the embedding.
    """

    name = "gated"
    traits = Traits(True, sums_to_one=False, has_query=True, starts_standard=False)

    def __init__(self, num_sublayers, width, *, slope: float = 0.5):
        super().__init__(num_sublayers, width)
        self.slope = slope
        self.query = nn.Parameter(torch.empty(num_sublayers + 1, width))
        self.bias = nn.Parameter(torch.empty(num_sublayers + 1, num_sublayers + 1))
        self.init_parameters()

    def init_parameters(self):
        nn.init.zeros_(self.query)
        start_at(self.bias, (self.slope * torch.arange(self.num_sublayers + 1.0) - 1).expand_as(self.bias))

    def start(self, embedding):
        return (embedding,)

    def read(self, state, index, norm):
        query, bias = self.query[index].to(state[0].dtype), self.bias[index].to(state[0].dtype)
        logits = [(v @ query) * (v.square().mean(-1) + 1e-6).rsqrt() + bias[i] for i, v in enumerate(state)]
        weights = torch.stack(logits, -1).sigmoid()
        h = sum(weights[..., i : i + 1] * v for i, v in enumerate(state))
        return self.normed(h, index, norm, weights.reshape(-1, len(state)), state), state

    def write(self, state, index, output):
        return (*state, output.to(state[0].dtype))

    def finish(self, state, norm):
        return self.read(state, self.num_sublayers, norm)[0]

    def hidden_state(self, state):
        return sum(state)

    def direction(self, index):
        return self.query[index].detach()

    def learned(self):
        bias = self.bias.detach().float().cpu()
        unused = torch.ones_like(bias).triu(1).bool()
        return {"bias": Learned(bias.masked_fill(unused, torch.nan), ("read", "source"), "bias of a source")}
'''

pytestmark = pytest.mark.usefixtures("registered_in_module")
SIZE = {name: value for name, value in NARROW.items() if name != "tie_word_embeddings"}
TEXT = "stream read write source block depth query norm head layer"
IDS = torch.arange(24).view(2, 12)
NAMES = ["anchored", "gated"]
TITLES = {"anchored": "weight of the embedding", "gated": "bias of a source"}
"""Of their learned tables."""
TRAINING = ["--steps", "4", "--val-every", "2", "--log-every", "1", "--depth-every", "2", "--save-every", "2"]
TRAINING += ["--batch-size", "4", "--seq-len", "16", "--val-windows", "4", "--dtype", "fp32", "--device", "cpu"]
TRAINING += ["--size", json.dumps(SIZE), "--lr", "0.02"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The file with the mechanisms, a corpus, and a run of each mechanism that was cut short and went on."""
    root = tmp_path_factory.mktemp("plugin")
    file = root / "mine.py"
    file.write_text(MECHANISMS, encoding="utf-8")
    draw = random.Random(0)
    corpus = root / "corpus"
    corpus.mkdir()
    for number in range(100):
        (corpus / f"{number}.txt").write_text(" ".join(draw.choices(TEXT.split(), k=60)), encoding="utf-8")
    data = ["--source", str(corpus), "--tokenizer", "bpe:280", "--held-out", "0.2"]
    return SimpleNamespace(
        root=root,
        anchored=f"{file}:Anchored",
        gated=f"{file}:Gated",
        data=data,
        corpus=corpus,
    )


@pytest.fixture(scope="module")
def runs(place):
    """A run of each mechanism."""
    for name in NAMES:
        out = ["--out", str(place.root / name)]
        cli.main(["train", "--residual", getattr(place, name), *place.data, *TRAINING, *out, "--no-progress"])
    return {name: place.root / name for name in NAMES}


def model_of(place, name, **settings):
    """A model whose residual is away from its start."""
    model = build(SIZE, getattr(place, name), vocab_size=60, max_positions=32, settings=settings).eval()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=draw))
    return model


def losses(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "val"]


@pytest.mark.quick("anchored")
@pytest.mark.parametrize("name", NAMES)
def test_check_passes(place, name, capsys):
    cli.main(["check", getattr(place, name)])
    assert "FAILED" not in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_is_cut_short_goes_on_bit_for_bit(place, runs, name, monkeypatch):
    from attnres.training.run import Run

    save = Run.save

    def cut(self, *arguments):
        save(self, *arguments)
        raise KeyboardInterrupt

    out = place.root / f"{name}-cut"
    command = ["train", "--residual", getattr(place, name), *place.data, *TRAINING, "--out", str(out), "--no-progress"]
    with monkeypatch.context() as patch:
        patch.setattr(Run, "save", cut)
        with pytest.raises(SystemExit):
            cli.main(command)
    assert not (out / "summary.json").exists()
    cli.main([*command, "--resume"])
    assert losses(out) == losses(runs[name])
    whole, resumed = (load(run / "model").state_dict() for run in (runs[name], out))
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)
    start = build(SIZE, name, vocab_size=280).residual.state_dict()
    assert all(not torch.equal(whole[f"model.residual.{key}"], value) for key, value in start.items())


BROKEN = """
import torch
from attnres.residuals.mechanisms.standard import Standard

class Typo(Standard):
    name = "typo"
    def read(self, state, index, norm):
        return super().read(state, indx, norm)

class InPlace(Standard):
    name = "in_place"
    def write(self, state, index, output):
        return state.add_(output)

class Hidden(Standard):
    name = "hidden"
    def implied(self, index):
        return torch.ones(7)
"""


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("Typo", ["own.py fails in line 8", "name 'indx' is not defined"]),
        ("InPlace", ["'in_place' of", "cannot be trained", "attnres check", "shows where"]),
    ],
)
def test_a_mistake_in_the_file_is_called_that_before_a_run_begins(place, tmp_path, capsys, label, words):
    file, out = tmp_path / "own.py", tmp_path / "out"
    file.write_text(BROKEN)
    for command in (
        ["train", "--residual", f"{file}:{label}", *place.data, *TRAINING, "--out", str(out)],
        ["compare", "--variants", "standard", f"{file}:{label}", *place.data, *TRAINING, "--out", str(out)],
    ):
        with pytest.raises(SystemExit) as left:
            cli.main(command)
        error = capsys.readouterr().err
        assert left.value.code == 2 and not out.exists()
        assert [word for word in words if word not in error] == [], error


@pytest.mark.long
@pytest.mark.usefixtures("registered")
def test_a_run_whose_inspection_fails_is_finished(place, tmp_path, capsys):
    file, out = tmp_path / "own.py", tmp_path / "out"
    file.write_text(BROKEN)
    options = ["--depth-every", "0", "--out", str(out), "--no-progress"]
    cli.main(["train", "--residual", f"{file}:Hidden", *place.data, *TRAINING, *options])
    assert "finished without inspection.json: " in capsys.readouterr().err
    assert (out / "summary.json").is_file() and not (out / "inspection.json").exists()


@pytest.mark.usefixtures("registered")
def test_a_file_that_changed_is_not_taken_for_the_old_one(place, tmp_path, capsys, monkeypatch):
    file = tmp_path / "own.py"
    file.write_text(MECHANISMS.replace('"anchored"', '"own"'))
    out = tmp_path / "run"
    command = ["train", "--residual", f"{file}:Anchored", *place.data, *TRAINING, "--out", str(out), "--no-progress"]
    cli.main(command)
    recorded = json.loads((out / "config.json").read_text())["model"]["residual_sha256"]
    assert recorded == hashlib.sha256(file.read_bytes()).hexdigest()
    cli.main([*command, "--resume"])  # the same file: finished already
    file.write_text(file.read_text().replace("x + self.weight", "x - self.weight"))
    with pytest.raises(SystemExit) as left:
        cli.main([*command, "--resume"])
    assert left.value.code == 2 and "was made with another content of" in capsys.readouterr().err
    monkeypatch.setenv(PLUGINS, f"{file}:Anchored")
    with pytest.warns(UserWarning, match=r"own\.py:Anchored has changed since this model was made"):
        load(out / "model")
    with pytest.raises(UserError, match=r"own\.py:Anchored has changed since this configuration was written"):
        prepare_run(from_dict(json.loads((out / "config.json").read_text())))


@pytest.mark.long
def test_compare_and_report(place, runs, capsys):
    out = place.root / "compared"
    options = ["--out", str(out), "--jobs", "1", "--timing-s", "0.2"]
    variants = ["standard", f"{place.anchored}:anchor=0.5@lr=0.01"]
    cli.main(["compare", "--variants", *variants, *place.data, *TRAINING, *options])
    labels = ["standard", "anchored-anchor0.5-lr0.01"]
    table = capsys.readouterr().out
    assert all(label in table for label in labels)
    config = json.loads((out / "anchored-anchor0.5-lr0.01-seed0" / "config.json").read_text())["model"]
    assert config["residual"] == "anchored" and config["residual_file"] == place.anchored
    cli.main(["report", str(out), str(runs["gated"]), "--out", str(out)])
    page = (out / "report.html").read_text()
    assert all(label in page for label in [*labels, "gated"])
    assert "#8a2be2" in page and all(title in page for title in TITLES.values())


def test_a_plain_checkpoint_converts_without_a_loss(place, capsys):
    config = {key: value for key, value in SIZE.items() if key != "family"}
    torch.manual_seed(0)
    plain = Qwen3ForCausalLM(Qwen3Config(**config, vocab_size=60, initializer_range=0.2)).eval()
    plain.save_pretrained(place.root / "plain")
    cli.main(["convert", str(place.root / "plain"), str(place.root / "converted"), "--residual", place.anchored])
    assert "anchored" in capsys.readouterr().out
    model = load(place.root / "converted")
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=IDS).logits, plain(input_ids=IDS).logits, rtol=1e-5, atol=1e-5)
    assert model.config.residual_file == place.anchored
    with pytest.raises(SystemExit) as left:
        cli.main(["convert", str(place.root / "plain"), str(place.root / "no"), "--residual", place.gated])
    assert left.value.code == 2 and "would change the logits" in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_reads_are_recorded_edited_and_attributed(place, name):
    model = model_of(place, name)
    with torch.no_grad(), record(model, tokens=True) as trace:
        expected = model(input_ids=IDS).logits
    rows = trace.mixing
    assert rows.shape == (5, 5) and [len(row) for row in trace.sources] == [1, 2, 3, 4, 5]
    weight = model.residual.state_dict()
    if name == "anchored":
        assert rows[4] == pytest.approx([1 + weight["weight"][4].item(), 1, 1, 1, 1]) and trace.routing is None
    else:
        assert trace.routing["weights"][4] == pytest.approx(rows[4]) and 0 < rows.max() < 1
        assert len(trace.source_cosine[4]) == 5
    # Without the embedding at the output, from the weights alone.
    with torch.no_grad(), intervene(model, Ablate("embedding", reads="output")):
        edited = model(input_ids=IDS).logits
    with (
        torch.no_grad(),
        intervene(model, Reweigh(lambda p, names: p.mean(-1, keepdim=True), "mlp 0")),
        record(model) as uniform,
    ):
        model(input_ids=IDS)
    assert not torch.allclose(edited, expected) and len(set(map(float, uniform.weights[1]))) == 1
    change = effect(model, IDS[0], Ablate("embedding", reads="output"))
    ours = torch.nn.functional.cross_entropy(edited[0, :-1], IDS[0, 1:])
    assert sum(change.loss_after) / len(change.loss_after) == pytest.approx(ours.item(), rel=1e-5)
    edges = attribute(model, IDS[0])
    assert len(edges.top(20)) == 2 + 3 + 4 + 5 and any(edge.knockout for edge in edges.top())


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_inspection_figures_and_text(place, runs, name, capsys, tmp_path):
    run = str(runs[name])
    options = ["--text", TEXT, "--no-progress", "--device", "cpu"]
    cli.main(["inspect", run, *options, "--knock-out", "embedding@output", "--attribute"])
    assert "embedding" in capsys.readouterr().out
    if name == "gated":
        report = prune_report(Inspection.load(runs[name] / "inspection.json"))
        assert len(report.edges) == 2 + 3 + 4 + 5
    drawn, weighed = tmp_path / "drawn", tmp_path / "weighed"
    cli.main(["figures", str(runs[name] / "inspection.json"), str(drawn), "--formats", "svg"])
    figures = {path.stem: path.read_text() for path in drawn.glob("*.svg")}
    assert {"patterns", "layers", "learned", "mixing", "depth", "magnitudes"} <= set(figures)
    # what a source is of a read varies with the token, whatever the weights do
    assert {"kinds", "tokens"} <= set(figures) and ("queries" in figures) == (name == "gated")
    cli.main(["figures", str(runs[name] / "inspection.json"), str(weighed), "--formats", "svg", "--by", "weight"])
    by_weight = {path.stem for path in weighed.glob("*.svg")}
    assert {"kinds", "tokens"} & by_weight == ({"kinds", "tokens"} if name == "gated" else set())
    assert TITLES[name] in figures["learned"]
    cli.main(["generate", run, "--prompt", "stream read", "--max-new-tokens", "3", "--greedy", "--device", "cpu"])
    assert capsys.readouterr().out
    (tmp_path / "text.txt").write_text(TEXT * 5)
    cli.main(["eval", run, "--tasks", str(tmp_path / "text.txt"), "--window", "16", "--device", "cpu", "--no-progress"])
    assert "perplexity" in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_the_explorer_shows_it(runs, name):
    page = Page([Opened(runs[name])])
    shown = page.show(View("stream read", cuts=(Cut(0, 3, 1),)))["panes"][0]
    assert shown["loss_cut"] != shown["loss"] and name in shown["title"]


def test_a_models_folder_runs_no_file_unasked(tmp_path, registered):
    marker, file = tmp_path / "was run", tmp_path / "secret.py"
    file.write_text(
        "from pathlib import Path\n"
        "from attnres.residuals.mechanisms.standard import Standard\n"
        f"Path({str(marker)!r}).touch()\n"
        "class Secret(Standard):\n    name = 'secret'\n"
    )
    build(SIZE, f"{file}:Secret", vocab_size=60).save_pretrained(tmp_path / "model")
    assert registered() == ["secret"]
    del registry._MECHANISMS["secret"], registry._FILES["secret"]
    sys.modules.pop(next(name for name in sys.modules if name.startswith("attnres_plugin_secret")))
    marker.unlink()

    def refused(message, **fields):
        config = tmp_path / "model" / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), **fields}))
        with pytest.raises(UserError, match=message):
            load(tmp_path / "model")
        assert not marker.exists() and not registered()

    refused("secret.py:Secret, which is not run unasked")
    refused("a config, which runs no file", residual=f"{file}:Secret")
    refused("unknown residual 'secret'", residual="secret", residual_file=None)
    refused("is not run unasked", residual_file=f"{file}:Secret")
    with pytest.raises(UserError, match="is not run unasked"):  # the configuration of a run, read as a file
        prepare_run(from_dict({"model": {"residual": "secret", "residual_file": f"{file}:Secret"}}))
    assert not marker.exists()
    load(tmp_path / "model", trust_remote_code=True)
    assert marker.exists() and registered() == ["secret"]


FRESH = """
import os, sys, torch
import attnres
from attnres.models import load

folder, entry, name = sys.argv[1:]
try:
    load(folder)
except attnres.UserError as error:
    print(error)
os.environ["ATTNRES_RESIDUALS"] = entry
model = load(folder)
with torch.no_grad():
    print(model.config.residual, repr(model(input_ids=torch.arange(24).view(2, 12)).logits.double().sum().item()))
"""


TRUSTING = """
import sys, torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
with torch.no_grad():
    print(model.config.residual, repr(model(input_ids=torch.arange(24).view(2, 12)).logits.double().sum().item()))
"""


@pytest.mark.long
def test_a_fresh_process_loads_it_where_the_environment_names_the_file_or_code_is_trusted(place):
    """And one that does not is told which file is missing; nothing in the model's folder is run."""
    model = model_of(place, "gated")
    export_model(model, place.root / "saved")
    with torch.no_grad():
        expected = model(input_ids=IDS).logits.double().sum().item()
    environment = {key: value for key, value in os.environ.items() if key != PLUGINS}
    arguments = [sys.executable, "-c", FRESH, str(place.root / "saved"), place.gated, "gated"]
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    refusal, computed = done.stdout.splitlines()
    assert place.gated in refusal and f"{PLUGINS}=" in refusal and "not run unasked" in refusal
    assert computed == f"gated {expected!r}"
    environment["HF_MODULES_CACHE"] = str(place.root / "modules")
    done = subprocess.run([*arguments[:2], TRUSTING, arguments[3]], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == computed
