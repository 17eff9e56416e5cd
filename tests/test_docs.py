"""README and docs: their Python runs, their links lead somewhere, the files they name exist."""

import math
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import torch
import yaml
from tiny import SIZE
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import attnres

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("**/*.md"))]
PLACES = "attnres|benchmarks|docs|examples|experiments|recipes|tests"


def ids(path: Path) -> str:
    return path.name


def blocks(page: Path) -> list[tuple[int, str]]:
    """The Python blocks of a page with the line each begins on."""
    text = page.read_text(encoding="utf-8")
    matches = re.finditer(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(1)) + 1, match.group(1)) for match in matches]


def run(page: Path, names: dict[str, Any], *chosen: tuple[int, str]) -> None:
    """Run blocks of a page one after the other in one namespace."""
    for line, code in chosen:
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the pages' models lie, tiny ones: a pretrained one of that name, and the demo's."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    words = ["Attention", "is", "all", "you", "need", "<unk>", "<eos>"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fields = {name: value for name, value in SIZE.items() if name != "family"} | {"num_hidden_layers": 4}
    pretrained = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(words), **fields))
    pretrained.save_pretrained("Qwen/Qwen3-0.6B")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained("Qwen/Qwen3-0.6B")
    attnres.convert("Qwen/Qwen3-0.6B", out="models/block", num_blocks=8)
    demo = attnres.build(SIZE | {"num_hidden_layers": 12}, "block", vocab_size=50)
    demo.save_pretrained("runs/demo/block-seed0/model")
    return tmp_path


def test_the_code_of_readme_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "README.md"
    spaces = [dict[str, Any]() for _ in blocks(page)]  # each block runs alone, as one copies it
    for names, block in zip(spaces, blocks(page), strict=True):
        run(page, names, block)
    printed = capsys.readouterr().out
    assert (
        float(printed.split()[0]) < 1e-5 and "logits" in printed
    )  # attached and converted models compute what they did


def test_the_transformer_of_the_tutorial_is_what_it_says(folder: Path) -> None:
    """With fresh queries and sums, every residual computes the standard one's logits."""
    page = DOCS / "tutorials" / "your_model.md"
    names: dict[str, Any] = {}
    run(page, names, blocks(page)[1])
    transformer, inputs = names["Transformer"], torch.randint(256, (2, 16))
    outputs = []
    for residual, settings in (("standard", {}), ("block", {"num_blocks": 4}), ("full", {})):
        settings = settings if residual == "standard" else settings | {"read_scale": "sum"}
        torch.manual_seed(0)
        outputs.append(transformer(vocab=256, width=64, heads=4, layers=6, residual=residual, **settings)(inputs))
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("page", [page for page in PAGES[1:] if page.exists() and blocks(page)], ids=ids)
def test_the_code_of_a_page_runs(page: Path, folder: Path) -> None:
    run(page, {"ids": torch.randint(50, (1, 20))}, *blocks(page))


def anchors(page: Path) -> set[str]:
    """The fragments that a page's headings make."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, fragment = unquote(target).partition("#")
        to = (page.parent / name).resolve() if name else page
        assert to.exists(), f"{page.name} links to {target}"
        assert not fragment or fragment in anchors(to), f"{page.name} links to {target}, which has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(rf"(?<![\w./-])((?:{PLACES})/[\w./-]*\w/?)(?![*{{\[]|\w)", text))
    assert not [name for name in sorted(named) if not (ROOT / name).exists()]


def test_torchrun_starts_as_many_processes_as_the_layout_has() -> None:
    """README's line is for two, which any machine has; tests/scale runs such layouts."""
    processes = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in re.finditer(r"torchrun --nproc-per-node (\d+) -m attnres (train [^`#\n]*)", text):
            sizes = re.findall(r"--(?:dp|shard|pp|tp|cp) (\d+)", line[2])
            processes.append(int(line[1]))
            assert math.prod(map(int, sizes)) == processes[-1], f"{page.name}: {line[0]}"
    assert processes[0] == 2 and len(processes) > 4


def test_the_version_is_one() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == attnres.__version__
    assert f"## {attnres.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
