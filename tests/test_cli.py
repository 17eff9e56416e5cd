"""The command line: flags over files over defaults; a mistake is one sentence on stderr and exit status 2."""

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

import attnres
from attnres import cli
from attnres.commands.short import CALLS, Families
from attnres.comparison.plan import make_plan
from attnres.errors import DEBUG, Interrupted, UserError, foreign
from attnres.training.config import TrainConfig

LONG = "x" * 3000


def run(capsys, *arguments):
    """(exit status, stdout, stderr) of a command line."""
    code = 0
    try:
        cli.main(arguments)
    except SystemExit as left:
        code = left.code
    output = capsys.readouterr()
    return code, output.out, output.err


@pytest.fixture
def trained(monkeypatch):
    """Configurations that reach training, which is not done."""
    configs = []

    def train(config, *, progress):
        configs.append(config)
        return {"val_loss": 1.0, "perplexity": 2.7, "step": config.steps, "tokens": 8}

    monkeypatch.setattr("attnres.training.train", train)
    return configs


@pytest.fixture
def compared(monkeypatch):
    configs = []
    monkeypatch.setattr("attnres.comparison.compare.compare", configs.append)
    return configs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "unknown command 'trian': did you mean 'train'?"),
        (["--steps", "3", "train"], "the command comes first, found '--steps'"),
        (["train", "--setps", "3"], "unknown option '--setps': did you mean '--steps'?"),
        (["train", "--setps=3"], "unknown option '--setps': did you mean '--steps'?"),
        (["train", "--data.lr", "0.5"], "unknown option '--data.lr': did you mean '--lr'?"),
        (["train", "--steps"], "--steps needs a value"),
        (["train", "--steps", "many"], "--steps: 'many' is no whole number"),
        (["train", "--source", ""], "source is given and empty: leave it out"),
        (["train", "--out", ""], "out is given and empty: leave it out"),
        (["plan", ""], "model is given and empty: leave it out"),
        (["train", "--name", "../x"], "name is '../x': expected a plain name, without folders"),
        (
            ["train", "--settings", "window=1", "window=2"],
            "Error parsing --settings: 'window' is given twice: give it once",
        ),
        (["train", "--size", "{family:qwen3}"], "the size {family:qwen3} names no family: expected {family: qwen3"),
        (["export", "model"], "OUT is missing"),
        (
            ["train", "--residual", "mine.py"],
            "residual 'mine.py' is no mechanism's name, nor a class",
        ),
        (["train", "--config", "a.yaml", "--config=b.yaml"], "--config is given twice"),
        (["train", "--optimizer", "adam"], "invalid choice 'adam' for argument '--optimizer'"),
        (["train", "--steps", "0"], "steps is 0: it must be a number above 0"),
        (["train", "--model.residual", "blokc"], "unknown residual 'blokc': did you mean 'block'?"),
        (["train", "--size", "{family: qwen3"], "Error parsing --size"),
        (["train", "here"], "unexpected argument 'here'"),
        (["train", "--config"], "--config needs a file"),
        (["train", "--config", "absent.yaml"], "cannot read absent.yaml: No such file"),
        (["compare", "--variants", "standard", "blokc"], "unknown residual 'blokc': did you mean 'block'?"),
        (["compare", "--residual", "block"], "unknown option '--residual': did you mean '--variants'?"),
        (["compare", "--seeds", "a", "b"], "--seeds: 'a', 'b' is not a valid value"),
        (["compare", "--resume"], "unknown option '--resume': the same command continues by itself"),
        (["compare", "--seed", "1"], "unknown option '--seed': did you mean '--seeds'?"),
        (["compare", "--seeds", "1", "1"], "seeds are [1, 1]: expected different whole numbers"),
        (["compare", "--seeds", "5000000000"], "seed is 5000000000: it must be at most"),
        (["compare", "--lrs", "0"], "lrs: the learning rate is '0.0', expected a number above 0"),
        (["compare", "--lr", "0", "--lrs", "1e-3"], "optim.lr is 0.0: it must be a number above 0"),
        (
            ["compare", "--size", "{family: qwen3, hidden_size: 30, num_attention_heads: 4}"],
            "hidden_size is 30 and num_attention_heads 4: the width must be divisible",
        ),
        (["compare", "--jobs", "0"], "jobs is 0: expected 1 or more"),
        (["compare", "--batch-size", "3", "--accumulation", "2"], "batch_size 3 does not divide into accumulation 2"),
        (["compare", "--variants", "block:num_blocks=99"], "num_blocks is 99: expected 1 to"),
        (["compare", "--variants", "full:read_scale=../x"], "variant 'full:read_scale=../x': the value '../x' of"),
        (["compare", "--out", "text.txt"], "text.txt is a file: expected a folder to write into"),
        (["compare", "--out", "."], ". is not empty and holds other files: expected an empty folder or a comparison"),
        (["compare", "--source", "absent.txt"], "source 'absent.txt' does not exist"),
        (["report"], "no folder given"),
        (["report", "text.txt"], "text.txt is not a folder"),
        (["report", "."], ". holds no runs"),
        (["eval", "none", "--out", "other.json"], "other.json is there and is no earlier result of this command"),
        (["report", "absent"], "absent is not a folder"),
        (["report", ".", "--images", "pdf"], "unknown image format 'pdf'"),
        (["prepare", "--source", "absent.txt"], "source 'absent.txt' does not exist"),
        (["eval"], "no model given: expected attnres eval MODEL..."),
        (["eval", "./absent", "--tasks", "text.txt"], "model './absent' does not exist: expected a run folder"),
        (["eval", ".", "--tasks", "text.txt"], ". holds no model: expected a run folder"),
        (
            ["eval", ".", "--tasks", "helaswag"],
            ". holds no model: expected a run folder",
        ),  # before tasks, which may be fetched
        (["eval", ".", "--limt", "3"], "unknown option '--limt': did you mean '--limit'?"),
        (["eval", ".", "--out", "results"], "--out is 'results': expected the name of a .json file"),
        (["generate", "./absent", "--prompt", "a"], "model './absent' does not exist: expected a run folder"),
        (["generate", "."], "--prompt is missing"),
        (["train", "--size", "{family: llama}"], "the size {family: llama} does not say hidden_size and num_hidden_l"),
        (
            ["train", "--size", "{family: qwen3, hidden_size: 16, num_hidden_layers: 1000000000}"],
            "num_hidden_layers is 1000000000: expected 1 to 10,000",
        ),
        (["compare", "--timing-s", "-1"], "timing_s is -1.0: expected seconds, 0 or more"),
        (["compare", "--timing-s", "nan"], "timing_s is nan: expected seconds, 0 or more"),
        (["study", "noise", "--seeds", "2"], "studies are in lab/ of the repository"),
        (["plan", "0.6b", "--gpus", "7", "--pp", "3"], "no layout of 7 GPUs has dp any, shard any, pp 3"),
        (["generate", "./absent", "--prompt", "a", "--seed", "-1"], "seed is -1: expected a whole number from 0 to"),
        (["plan", "--rows", "-1"], "rows is -1: expected a number, or 0 for all"),
        (["plan", "./nosuch"], "model './nosuch' does not exist"),
        (["plan", "--context", "-1"], "context is -1: it must be a number from 1 to 1,000,000,000"),
        (["export", "./absent", "out"], "model './absent' does not exist"),
        (["export", "./absent", "text.txt"], "text.txt is a file: expected a folder to write into"),
        (["convert", "./absent", "out"], "model './absent' does not exist"),
        (["inspect", "other.json"], "other.json holds no model"),
        (["inspect", "./absent"], "model './absent' does not exist"),
        (["figures", "other.json", "out"], "other.json is no inspection of format 1"),
        (["figures", "other.json"], "expected attnres figures MODEL [MORE ...] OUT"),
        (["app", "./absent"], "model './absent' does not exist"),
        (["check", "nosuch"], "unknown residual 'nosuch'"),
        (["mechanisms", "nosuch"], "unknown residual 'nosuch'"),
        (["env", "x"], "unexpected argument 'x'"),
    ],
)
def test_a_mistake_is_one_sentence_and_status_two(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATTNRES_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("a few words, again and again\n" * 2000)
    (tmp_path / "other.json").write_text('{"of": "another command"}')
    if arguments[0] == "train":  # whatever reaches the data gets little of it
        arguments = [*arguments[:1], "--source", "text.txt", "--tokenizer", "bpe:260", *arguments[1:]]
    before = sorted(path for path in tmp_path.iterdir())
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert err.splitlines()[-1].startswith(f"attnres: error: {message}")
    assert "Traceback" not in err
    assert sorted(path for path in tmp_path.iterdir() if path.name != "cache") == before  # nothing is half-written
    assert out == ""


def test_flags_override_the_file_which_overrides_the_defaults(capsys, tmp_path, trained):
    path = tmp_path / "run.yaml"
    path.write_text(
        "steps: 7\nseed: 3\nmodel: {residual: full, size: {family: qwen3, hidden_size: 64}}\noptim: {lr: 2e-3}\n"
    )
    assert run(capsys, "train", "--config", str(path), "--seed", "5", "--num-blocks", "4")[0] == 0
    (config,) = trained
    assert (config.steps, config.seed, config.optim.lr, config.batch_size) == (7, 5, 0.002, TrainConfig().batch_size)
    assert (config.model.residual, config.model.size["hidden_size"], config.model.num_blocks) == ("full", 64, 4)
    assert type(config) is TrainConfig


def test_settings_and_size_are_short_texts(capsys, tmp_path, trained):
    path = tmp_path / "run.json"
    path.write_text('{"model": {"residual": "block", "settings": {"num_blocks": 6}}}')
    run(capsys, "train", "--config", str(path))
    assert trained[0].model.settings == {"num_blocks": 6}
    size = "{family: qwen3, hidden_size: 8}"
    run(capsys, "train", "--residual", "full", "--settings", "read_scale=sum", "key_norm_eps=1e-5", "--size", size)
    assert trained[1].model.settings == {"read_scale": "sum", "key_norm_eps": 1e-5}
    assert trained[1].model.size == {"family": "qwen3", "hidden_size": 8}
    assert run(capsys, "train", "--settings", "6")[0] == 2


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.toml", "steps = 9\n[data]\nseq_len = 32\n"), ("a.json", '{"steps": 9, "data": {"seq_len": 32}}')],
)
def test_files_may_be_toml_or_json(capsys, tmp_path, trained, name, text):
    (tmp_path / name).write_text(text)
    run(capsys, "train", f"--config={tmp_path / name}")
    assert (trained[0].steps, trained[0].data.seq_len) == (9, 32)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "setps: 3\n", "unknown configuration key 'setps': did you mean 'steps'?"),
        ("a.yaml", "lr: 0.1\n", "unknown configuration key 'lr': did you mean 'optim.lr'?"),
        ("a.yaml", "steps: [\n", "is not valid YAML"),
        ("a.toml", "steps\n", "is not valid TOML"),
        ("a.yaml", "- 1\n", "holds a list: expected keys and values"),
        ("a.ini", "steps=1", "must end in .yaml"),
    ],
)
def test_a_broken_file_is_named(capsys, tmp_path, trained, name, text, message):
    (tmp_path / name).write_text(text)
    code, _, err = run(capsys, "train", "--config", str(tmp_path / name))
    assert code == 2
    assert message in err
    assert not trained


def test_compare_without_options_is_the_demo_in_its_default_size(capsys, compared):
    assert run(capsys, "compare")[0] == 0
    (config,) = compared
    assert config.variants == ["standard", "block", "full", "rescaled"]  # two at once: Block beside its baseline
    assert (config.seeds, config.base.model.size, config.base.data.source) == ([0], None, "stdlib")
    assert type(config.base) is TrainConfig


def test_compare_takes_lists_and_a_file(capsys, tmp_path, compared):
    path = tmp_path / "study.yaml"
    path.write_text(
        "variants: [standard, 'block:num_blocks=6']\nseeds: [0, 1, 2]\nsteps: 30\njobs: 2\nlrs: [1e-3, 2e-3]\n"
    )
    run(capsys, "compare", "--config", str(path), "--seeds", "4", "5", "--data.seq-len", "64")
    (config,) = compared
    assert config.variants == ["standard", "block:num_blocks=6"]
    assert (config.seeds, config.jobs, config.lrs) == ([4, 5], 2, [0.001, 0.002])
    assert (config.base.steps, config.base.data.seq_len) == (30, 64)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("variants: block\n", "variants is 'block': expected a list"),
        ("seeds: [a]\n", "seeds[0] is 'a': expected a whole number"),
        ("lrs: [fast]\n", "lrs[0] is 'fast': expected a number"),
        ("jobs: two\n", "expected a whole number"),
        ("jobs: 2.5\n", "jobs is 2.5: expected a whole number"),
        ("timing_s: yes\n", "timing_s is 'yes': expected a number"),
        ("seed: 3\n", "give seeds, a list"),
        ("model: {residual: full}\n", "model.residual in a comparison belongs to a variant"),
        ("model: {residual_file: 'a.py:A'}\n", "model.residual_file in a comparison belongs to a variant"),
        ("model: {residual_sha256: '12'}\n", "model.residual_sha256 in a comparison belongs to a variant"),
        ("name: mine\n", "name 'mine' in a comparison: each run has that of its variant and seed"),
        ("resume: true\n", "resume in a comparison: the same command continues what was stopped"),
        ("optim: {decay: 0.1}\n", "optim.decay is 0.1 and would have no effect: give schedule wsd"),
        ("optim: {optimizer: adamw, muon_lr: 0.1}\n", "optim.muon_lr is 0.1 and would have no effect: give optimizer"),
    ],
)
def test_a_file_for_one_run_is_not_taken_for_a_comparison(capsys, tmp_path, compared, text, message):
    (tmp_path / "a.yaml").write_text(text)
    code, _, err = run(capsys, "compare", "--config", str(tmp_path / "a.yaml"))
    assert (code, compared) == (2, [])
    assert message in err


def test_what_only_a_default_gives_is_not_refused(capsys, compared):
    """The rate of Muon that compare has where nothing is said."""
    assert run(capsys, "compare", "--optimizer", "adamw")[0] == 0
    (config,) = compared
    assert config.base.optim.muon_lr != TrainConfig().optim.muon_lr
    assert all(one.optim.muon_lr == TrainConfig().optim.muon_lr for one in make_plan(config).runs.values())


def test_help_and_version(capsys):
    assert run(capsys, "--version") == (0, f"attnres {attnres.__version__}\n", "")
    for arguments in ([], ["--help"], ["help"]):
        code, out, _ = run(capsys, *arguments)
        assert code == 0
        assert all(name in out for name in cli.COMMANDS)
    code, out, _ = run(capsys, "compare", "--help")
    assert code == 0
    assert out.index("--variants") < out.index("--steps")
    assert "--seed " not in out


@pytest.mark.quick("train --help", "compare --help", "app --help", "--version")
@pytest.mark.parametrize("arguments", ["--help", "--version", *(f"{name} --help" for name in cli.COMMANDS)])
def test_help_loads_no_heavy_library(arguments):
    script = (
        "import sys\nfrom attnres.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as left:\n    assert not left.code\n"
        "heavy = {'torch', 'numpy', 'transformers', 'matplotlib', 'pyarrow', 'starlette'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script, *arguments.split()], check=True, stdout=subprocess.DEVNULL)


def test_an_interruption_has_its_own_status(capsys, monkeypatch):
    def stop(error):
        def train(config, *, progress=True):
            raise error

        return train

    monkeypatch.setattr("attnres.training.train", stop(Interrupted("stopped at step 3", 143)))
    assert run(capsys, "train") == (143, "", "attnres: stopped at step 3\n")
    monkeypatch.setattr("attnres.training.train", stop(KeyboardInterrupt()))
    code, _, said = run(capsys, "train")
    assert code == 130 and "--resume" in said
    monkeypatch.setattr("attnres.comparison.compare.compare", stop(KeyboardInterrupt()))
    code, _, said = run(capsys, "compare")
    assert code == 130 and "give the same command to continue" in said


def test_a_run_started_by_a_comparison_leaves_its_error_in_the_file(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNRES_ERROR_FILE", str(tmp_path / "error"))
    assert run(capsys, "train", "--steps", "x") == (2, "", "")
    assert "--steps: 'x' is no whole number" in (tmp_path / "error").read_text()


def test_what_nobody_foresaw_is_a_sentence_that_says_where_and_its_traceback_if_asked_for(
    capsys, monkeypatch, tmp_path
):
    def train(config, *, progress):
        raise RuntimeError("a bug\nin two lines")

    monkeypatch.setattr("attnres.training.train", train)
    monkeypatch.delenv(DEBUG, raising=False)
    code, out, err = run(capsys, "train", "--out", str(tmp_path))
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert re.search(rf"error: unforeseen RuntimeError at train.py:\d+, with {tmp_path} \(a bug\): a file", err)
    monkeypatch.setenv(DEBUG, "0")  # so that it is put back
    code, _, err = run(capsys, "train", "--debug")
    assert code == 1 and "Traceback" in err and "in two lines" in err
    code, _, err = run(capsys, "trian", "--debug")
    assert code == 2 and "Traceback" in err and err.splitlines()[-1].startswith("attnres: error: unknown command")


def of_a_cpu():
    torch.empty(2**56)


def of_a_gpu():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB.")


@pytest.mark.parametrize("ask", [of_a_cpu, of_a_gpu, lambda: bytearray(2**62)], ids=["CPU", "GPU", "Python"])
def test_memory_that_runs_out_is_no_mistake_of_ours(capsys, monkeypatch, ask):
    monkeypatch.setattr("attnres.training.train", lambda config, *, progress: ask())
    code, _, err = run(capsys, "train")
    assert code == 2 and err.startswith("attnres: error: out of memory (") and err.count("\n") == 1
    assert all(flag in err for flag in ("--accumulation", "--gradient-checkpointing", "--batch-size"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_output_that_finds_no_room_is_a_sentence():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "attnres", "--help"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    assert done.stderr == "attnres: error: cannot write its output (No space left on device): make room\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--settings", LONG],
        ["train", "--settings", f"{LONG}=1", f"{LONG}=1"],
        ["train", "--steps", LONG],
        ["train", "--optimizer", LONG],
        ["train", f"--{LONG}", "1"],
        ["train", "--residual", LONG],
        ["train", "--size", LONG],
        ["train", "--size", f"{{family: {LONG}"],
        ["train", "--source", LONG],
        ["train", "--config", LONG],
        ["train", LONG],
        ["compare", "--seeds", LONG, LONG],
        ["compare", "--variants", f"block:{LONG}=1"],
        ["generate", LONG, "--prompt", "a"],
        [LONG],
    ],
    ids=lambda arguments: " ".join(word[:20] for word in arguments),
)
def test_what_a_sentence_quotes_is_shortened(capsys, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, *arguments)
    assert code == 2 and "x" * 10 in err and len(err) < 1000


def test_the_parser_whose_words_are_read_is_bounded():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (tyro,) = (one for one in map(Requirement, project["dependencies"]) if one.name == "tyro")
    assert version("tyro") in tyro.specifier and "2.0" not in tyro.specifier and "1.1" not in tyro.specifier


class PanicException(BaseException):
    """As libraries written in Rust raise it: no `Exception`."""


def test_a_panic_of_a_library_is_a_sentence_too(capsys, monkeypatch):
    def panic(*_):
        raise PanicException("range end index 7 out of range")

    with pytest.raises(UserError, match=r"it is no tokenizer \(range end index 7 out of range\): give another"):  # noqa: SIM117
        with foreign("it is no tokenizer", "give another"):
            panic()
    monkeypatch.setitem(CALLS, "families", (Families, "", panic))
    code, _, err = run(capsys, "families")
    assert code == 1 and err.startswith("attnres: error: unforeseen PanicException") and err.count("\n") == 1
    with pytest.raises(SystemExit), foreign("it is no tokenizer", "give another"):
        raise SystemExit(3)


def test_prepare_says_what_it_made(capsys, tmp_path):
    (tmp_path / "text.txt").write_text("a few words, again and again\n" * 200)
    out = tmp_path / "shards"
    source = str(tmp_path / "text.txt")
    code, output, _ = run(capsys, "prepare", "--source", source, "--tokenizer", "bpe:270", "--out", str(out))
    assert code == 0
    assert "train: " in output
    assert str(out) in output
    assert (out / "header.json").exists()


@pytest.fixture
def full_disk(monkeypatch):
    """Makes every later write in this process fail."""

    def fill():
        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("attnres.files.os.fsync", full)

    return fill


def bytes_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def started_run(folder):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model": {"residual": "full"}, "seed": 0}))


def test_a_full_disk_under_a_comparison_leaves_what_was_there(capsys, tmp_path, monkeypatch, full_disk):
    monkeypatch.setenv("ATTNRES_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text").mkdir()
    for i in range(20):
        (tmp_path / "text" / f"{i}.txt").write_text(f"document {i}: a few words, again and again\n" * 40)
    data = ["--source", str(tmp_path / "text"), "--tokenizer", "bpe:260", "--held-out", "0.2"]
    assert run(capsys, "prepare", *data)[0] == 0
    out = tmp_path / "out"
    started_run(out / "other-seed0")
    (out / "compare.json").write_text("{}")
    assert run(capsys, "report", str(out))[0] == 0
    before = bytes_of(out)
    full_disk()
    code, _, err = run(capsys, "compare", *data, "--seq-len", "16", "--out", str(out))
    assert code == 2
    assert err.splitlines()[-1].startswith(f"attnres: error: cannot write {out / 'compare.json'}: No space left on")
    assert bytes_of(out) == before


def test_a_full_disk_under_a_report_leaves_the_earlier_one(capsys, tmp_path, full_disk):
    started_run(tmp_path / "full-seed0")
    assert run(capsys, "report", str(tmp_path))[0] == 0
    before = bytes_of(tmp_path)
    full_disk()
    code, out, err = run(capsys, "report", str(tmp_path))
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith(f"attnres: error: cannot write {tmp_path / 'report.html'}: No space left on device")
    assert bytes_of(tmp_path) == before


@pytest.mark.parametrize(
    ("name", "content"),
    [("config.json", "{"), ("metrics.jsonl", "x\ny\n"), ("data.json", "[]"), ("val/000001.npy", "x")],
)
def test_a_damaged_run_is_one_sentence_and_keeps_the_earlier_report(capsys, tmp_path, name, content):
    started_run(tmp_path / "full-seed0")
    assert run(capsys, "report", str(tmp_path))[0] == 0
    before = (tmp_path / "report.html").read_bytes()
    (tmp_path / "full-seed0" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "full-seed0" / name).write_text(content)
    code, out, err = run(capsys, "report", str(tmp_path))
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert f"{tmp_path / 'full-seed0' / name} is" in err
    assert "damaged" in err
    assert (tmp_path / "report.html").read_bytes() == before


def test_report_prints_the_table_and_writes_beside_the_runs(capsys, tmp_path):
    started_run(tmp_path / "full-seed0")
    code, out, _ = run(capsys, "report", str(tmp_path))
    assert code == 0
    assert "full" in out
    assert "No variant has finished yet" in out
    assert (tmp_path / "report.html").exists()


def test_convert_writes_a_model_and_says_how_exact_it_is(tmp_path, capsys):
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    LlamaForCausalLM(LlamaConfig(**size, vocab_size=64)).save_pretrained(tmp_path / "plain")
    arguments = ["convert", str(tmp_path / "plain"), str(tmp_path / "out"), "--num-blocks", "2"]
    cli.main(arguments)
    assert "logits" in capsys.readouterr().out and (tmp_path / "out" / "conversion.json").exists()
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2 and "not empty" in capsys.readouterr().err


def test_convert_takes_any_setting_of_the_residual_once(tmp_path, capsys):
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    LlamaForCausalLM(LlamaConfig(**size, vocab_size=64)).save_pretrained(tmp_path / "plain")
    arguments = ["convert", str(tmp_path / "plain"), str(tmp_path / "out")]
    code, _, err = run(capsys, *arguments, "--num-blocks", "2", "--settings", "num_blocks=3")
    assert code == 2 and "--num-blocks" in err and not (tmp_path / "out").exists()
    code, _, _ = run(capsys, *arguments, "--settings", "num_blocks=4", "alpha=learnable")
    assert code == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["residual_settings"].items() >= {"num_blocks": 4, "alpha": "learnable", "read_scale": "sum"}.items()


def test_families_names_what_converts_and_what_is_refused(capsys):
    cli.main(["families"])
    output = capsys.readouterr().out
    assert "Qwen3" in output and "refused" in output
