"""Nothing of `values.json` moves without a line in MOVED.

The file was written at the commit before the package was put in order. Losses are compared to what another processor
rounds differently; on one machine `values.py` shows every digit.
"""

import json

import pytest
import torch
import values
from sample_mechanisms import crossed

import attnres
from attnres.residuals import settings_of

THEN = json.loads((values.HERE / "values.json").read_text())
_STUDY = """
    --adopt --allow-different --budget --column --dry-run --executor --help --images --jobs --list --no-allow-different
    --no-dry-run --no-list --no-report --out --preset --report --runs --seeds --slurm --source
""".split()
MOVED: dict[str, str] = (
    {f"study {flag}": "the laboratory is no command of the package: python -m lab" for flag in _STUDY}
    | {
        f"attnres.inspect.{name}": "Ablate, or one line of Reweigh (docs/how-to/edit.md)"
        for name in ("AddLogit", "KnockOut", "Pin", "Recency", "Swap", "Uniform", "pin_from")
    }
    | {
        f"{command} --residual-{name}": "it gained nothing in any comparison"
        for command in ("train", "compare")
        for name in ("hold", "warmup")
    }
    | {"prepare --workers": "two took 0.61 of one process's speed, which has the tokenizer's own threads"}
)
"""A name or "command --flag" that is gone, and why."""


@pytest.mark.parametrize("name", crossed(values.mechanisms()))
def test_ten_training_steps(name):
    torch.testing.assert_close(values.ten_steps(name, torch.float64), THEN["steps fp64"][name], rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(values.ten_steps(name, torch.float32), THEN["steps fp32"][name], rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("name", crossed(values.mechanisms()))
def test_a_saved_model_loads(name):
    torch.testing.assert_close(values.logits(values.HERE / "models" / name), THEN["logits"][name], rtol=1e-7, atol=1e-9)


def test_a_saved_model_without_settings_keeps_its_function_and_is_saved_with_all(tmp_path):
    folder = values.HERE / "models" / "block"
    assert json.loads((folder / "config.json").read_text())["residual_settings"] == {}
    model = attnres.load(str(folder))
    assert model.config.residual_settings == {}  # in memory, and where people see them, those that were chosen
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["residual_settings"]
    assert written == settings_of("block") and written["read_scale"] == "mean" and written["num_blocks"] is None
    torch.testing.assert_close(values.logits(tmp_path), THEN["logits"]["block"], rtol=1e-7, atol=1e-9)
    assert attnres.load(str(tmp_path)).config.residual_settings == {}


def test_public_names_are_there():
    gone = {f"{package}.{name}" for package, names in THEN["names"].items() for name in names}
    gone -= {f"{package}.{name}" for package, names in values.names().items() for name in names}
    assert gone <= set(MOVED)


def test_flags_are_there():
    now = values.flags()
    gone = {f"{command} {flag}" for command, flags in THEN["flags"].items() for flag in flags}
    gone -= {f"{command} {flag}" for command, flags in now.items() for flag in flags}
    assert gone <= set(MOVED)


@pytest.mark.long
def test_layouts_of_two_processes(tmp_path):
    for layout, rows in values.layouts(tmp_path).items():
        torch.testing.assert_close(rows, THEN["layouts"][layout], rtol=2e-3, atol=1e-4)
