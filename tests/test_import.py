"""`import attnres` is light: torch, and nothing that torch does not bring."""

import subprocess
import sys

HEAVY = ["transformers", "tokenizers", "matplotlib", "pyarrow", "rich", "tyro", "datasets", "yaml"]


def test_importing_the_package_imports_torch_and_no_more():
    code = f"import sys, attnres; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_public_names_are_there():
    import attnres

    assert set(attnres.__all__) <= set(dir(attnres))
