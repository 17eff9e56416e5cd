"""Print the size of each package and the functions that take a training configuration.

    python benchmarks/house.py [--names]

A function takes the configuration if a parameter's annotation names one of `CONFIGURATIONS`; methods count, lambdas do
not. `--names` lists these functions. Lines are those of the files, with blanks and comments.
"""

import argparse
import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONFIGURATIONS = {"TrainConfig", "CompareConfig", "PreparedRun"}


def taking_configuration(path: Path) -> Iterator[str]:
    """Yield `file:line name` of every function in a file that takes the configuration."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(node, ast.FunctionDef):
            continue
        parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for annotation in (parameter.annotation for parameter in parameters):
            words = {part.id for part in ast.walk(annotation) if isinstance(part, ast.Name)} if annotation else set()
            if words & CONFIGURATIONS:
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
                break


def main() -> None:
    """Print the table, and the functions if they are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", action="store_true", help="list the functions that take the configuration")
    names = parser.parse_args().names
    files, lines, found = Counter[str](), Counter[str](), list[str]()
    for top in ("attnres", "lab", "tests", "benchmarks"):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).parts
            package = "/".join(parts[:2]) if top == "attnres" and len(parts) > 2 else top
            files[package] += 1
            lines[package] += len(path.read_text("utf-8").splitlines())
            if top == "attnres":
                found += taking_configuration(path)
    for package in files:
        print(f"{package:24} {files[package]:4} files {lines[package]:7,} lines")
    wheel = [package for package in files if package.startswith("attnres")]
    total = sum(files[package] for package in wheel), sum(lines[package] for package in wheel)
    print(f"{'the wheel':24} {total[0]:4} files {total[1]:7,} lines")
    print(f"functions that take the configuration: {len(found)}")
    if names:
        print("\n".join(found))


if __name__ == "__main__":
    main()
