"""`import attnres` is quick, and everything public is there when it is asked for."""

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import attnres

HEAVY = ["torch", "numpy", "transformers", "tokenizers", "matplotlib", "pyarrow", "rich", "tyro", "datasets", "yaml"]


def run(code: str) -> str:
    """What a new process prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_the_package_imports_no_library():
    assert run(f"import sys, attnres; print([name for name in {HEAVY} if name in sys.modules])") == "[]"


@pytest.mark.long
def test_importing_the_package_alone_registers_it_with_transformers(tmp_path):
    """Models are imported when the Auto classes are asked for one of ours, not when Transformers is; families that were
    probed load too, without code of the folder's being trusted; and a plain class that is given one of ours says so."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    fields = {**sizes, "num_key_value_heads": 2, "vocab_size": 9, "residual": "full"}
    family = {"config": "ArceeConfig", "causal_lm": "ArceeForCausalLM"}
    folders = {"attnres_llama": {}, "attnres_arcee": {"residual_family": family}}
    for kind, more in folders.items():
        (tmp_path / kind).mkdir()
        auto_map = {"AutoConfig": "modeling_attnres.Config"}
        config = {**fields, **more, "model_type": kind, "auto_map": auto_map}
        (tmp_path / kind / "config.json").write_text(json.dumps(config))
    code = (
        "import sys, warnings, attnres; from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig\n"
        "AutoConfig.for_model('llama'); print('attnres.models' in sys.modules)\n"
        "for folder in sys.argv[1:]:\n"
        "    print(type(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))).__name__)\n"
        "with warnings.catch_warnings(record=True) as said: LlamaConfig.from_pretrained(sys.argv[1])\n"
        "print(*{str(one.message) for one in said})"
    )
    command = [sys.executable, "-c", code, *(str(tmp_path / kind) for kind in folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    before, *classes, said = done.stdout.splitlines()
    assert before == "False" and classes == ["AttnResLlamaForCausalLM", "AttnResArceeForCausalLM"]
    assert "depth reads" in said and "LlamaConfig: its residual is left out" in said


ATTACHED = """
import attnres, sys, torch
from torch import nn
layer = nn.TransformerEncoderLayer(8, 2, 8, norm_first=True, batch_first=True)
encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8), enable_nested_tensor=False)
attnres.depth_read, attnres.attach(encoder, "block", example=torch.randn(1, 2, 8))
"""


def test_reads_residuals_and_attach_need_torch_alone():
    assert run(f"{ATTACHED}print([name for name in {HEAVY[2:]} if name in sys.modules])") == "[]"


@pytest.mark.parametrize("name", attnres.__all__)
def test_every_public_name_is_what_it_says(name):
    value = getattr(attnres, name)
    assert getattr(value, "__name__", name) == name
    assert name in dir(attnres)


PACKAGES = ["app", "cli", "comparison", "data", "evals", "inspect", "models", "ops", "report", "residuals"]
CODES = [
    "import attnres.training, attnres.training.run, attnres.inspect.recording, attnres.models.convert, attnres; "
    "print([type(getattr(attnres, n)).__name__ for n in ('train', 'record', 'convert')])",
    f"import attnres; print([getattr(attnres, n).__name__ for n in {PACKAGES}])",
]


@pytest.mark.long  # new processes, in which nothing of ours was imported before
def test_names_are_the_same_whatever_was_imported_before():
    functions, submodules = map(run, CODES)
    assert ast.literal_eval(functions) == ["function"] * 3
    assert ast.literal_eval(submodules) == [f"attnres.{name}" for name in PACKAGES]


def test_no_module_takes_the_place_of_a_public_name():
    """An import of a submodule sets the package's attribute of its name, whatever stood there."""
    for folder in (Path(attnres.__file__).parent / name for name in ("", "data", "inspect", "training")):
        names = importlib.import_module(".".join(["attnres", folder.name]) if folder.name != "attnres" else "attnres")
        beside = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
        assert not beside & set(names.__all__)


def test_an_unknown_name_is_no_attribute():
    with pytest.raises(AttributeError, match="module 'attnres' has no attribute 'modles'"):
        attnres.modles  # noqa: B018


def test_type_checkers_read_the_same_table():
    tree = ast.parse(Path(attnres.__file__).read_text(encoding="utf-8"))
    (branch,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in branch.body if isinstance(node, ast.ImportFrom)]
    names = {name.name: node.module for node in imports for name in node.names}
    assert {name: module for name, module in names.items() if module != "attnres"} == attnres.HOMES
    assert {*attnres.HOMES, "__version__"} == set(attnres.__all__)
