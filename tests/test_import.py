"""`import attnres` is quick, and everything public is there when it is asked for."""

import ast
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


def test_importing_the_package_alone_registers_it_with_transformers(tmp_path):
    """Models are imported when the Auto classes are asked for one of ours, not when Transformers is."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "attnres_llama", "residual": "full"}))
    code = (
        "import sys, attnres; from transformers import AutoConfig, AutoModelForCausalLM; AutoConfig.for_model('llama');"
        "before = 'attnres.models' in sys.modules; config = AutoConfig.from_pretrained(sys.argv[1], hidden_size=16,"
        "intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, vocab_size=9);"
        "print(before, type(AutoModelForCausalLM.from_config(config)).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "AttnResLlamaForCausalLM"]


def test_reads_and_residuals_need_torch_alone():
    code = f"attnres.depth_read, attnres.make_residual; print([name for name in {HEAVY[2:]} if name in sys.modules])"
    assert run(f"import sys, attnres; {code}") == "[]"


@pytest.mark.parametrize("name", attnres.__all__)
def test_every_public_name_is_what_it_says(name):
    value = getattr(attnres, name)
    assert getattr(value, "__name__", name) == name
    assert name in dir(attnres)


def test_names_are_the_same_whatever_was_imported_before():
    code = "import attnres.training, attnres.training.loop, attnres.inspect.record, attnres.models.convert, attnres"
    assert run(f"{code}; print(*(type(getattr(attnres, n)).__name__ for n in ('train', 'record', 'convert')))") == (
        "function function function"
    )


@pytest.mark.parametrize("package", ["attnres.data", "attnres.inspect", "attnres.training"])
def test_no_module_takes_the_place_of_a_public_name(package):
    code = (
        f"import importlib, pkgutil, types, {package} as package;"
        "[importlib.import_module(f'{package.__name__}.{one.name}') for one in pkgutil.iter_modules(package.__path__)];"
        "print([name for name in package.__all__ if isinstance(getattr(package, name), types.ModuleType)])"
    )
    assert run(code) == "[]"


def test_submodules_are_attributes():
    packages = ["app", "cli", "data", "evals", "figures", "inspect", "models", "ops", "report", "residuals", "studies"]
    assert run(f"import attnres; print([getattr(attnres, n).__name__ for n in {packages}])") == str(
        [f"attnres.{name}" for name in packages]
    )
    with pytest.raises(AttributeError, match="module 'attnres' has no attribute 'modles'"):
        attnres.modles  # noqa: B018


def test_type_checkers_read_the_same_table():
    tree = ast.parse(Path(attnres.__file__).read_text(encoding="utf-8"))
    (branch,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in branch.body if isinstance(node, ast.ImportFrom)]
    names = {name.name: node.module for node in imports for name in node.names}
    assert {name: module for name, module in names.items() if module != "attnres"} == attnres.HOMES
    assert {*attnres.HOMES, "__version__"} == set(attnres.__all__)
