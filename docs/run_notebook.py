"""Run a notebook from a clean process and write its outputs into it: `python docs/run_notebook.py NOTEBOOK`.

Cells that begin with % are left to Jupyter, with no output. Run it where the notebook says that it is to be started.
"""

import ast
import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def main(path: Path) -> None:
    """Run the notebook's code cells one after the other in one namespace."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    for count, cell in enumerate((cell for cell in notebook["cells"] if cell["cell_type"] == "code"), start=1):
        source = "".join(cell["source"])
        cell["execution_count"] = count
        cell["outputs"] = [] if source.startswith("%") else outputs(source, names, count)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def outputs(source: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Run a cell; return what it printed and what its last expression shows, as a notebook's format 4 has them."""
    *before, last = ast.parse(source).body
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(before, []), "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        else:
            exec(compile(ast.Module([last], []), "cell", "exec"), names)
    shown: list[dict[str, Any]] = []
    if printed.getvalue():
        shown.append({"name": "stdout", "output_type": "stream", "text": printed.getvalue().splitlines(keepends=True)})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        if hasattr(value, "_repr_html_"):
            data = {"text/html": value._repr_html_().splitlines(keepends=True)}
        elif hasattr(value, "_repr_png_"):
            data = {"image/png": base64.b64encode(value._repr_png_()).decode()}
        result = {"data": data, "execution_count": count, "metadata": {}, "output_type": "execute_result"}
        shown.append(result)
    return shown


if __name__ == "__main__":
    main(Path(sys.argv[1]))
