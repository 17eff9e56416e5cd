"""Four gloo processes: stages with shares, copies with shares, longer pipelines, slices (`make test-scale`)."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from test_two_ranks import EXPERTS, configuration, furthest
from tiny import MOE
from two_ranks import resume, train_run

pytestmark = pytest.mark.scale

BLOCK = {"residual": "block", "settings": {"block_size": 3}}
CASES = [
    {**BLOCK, "schedule": "1f1b", "microbatches": 8},
    {"residual": "block", "settings": {"block_size": 2}, "schedule": "interleaved"},
    {"residual": "full", "schedule": "interleaved_zero_bubble"},
    {**BLOCK, "schedule": "zbv", "microbatches": 8, "tie": True},
    {**BLOCK, "schedule": "dualpipev", "microbatches": 8},
    {"residual": "standard", "schedule": "gpipe"},
]
LAYOUTS = {
    "copies of shares": {"dp": 2, "shard": 2},
    "stages of shares": {"pp": 2, "shard": 2, "pp_schedule": "interleaved"},
    "stages of copies": {"pp": 2, "dp": 2},
    "stages": {"pp": 4},
    "slices of shares": {"shard": 2, "tp": 2},
    "slices of copies": {"dp": 2, "tp": 2},
    "tokens of shares": {"shard": 2, "cp": 2},
}
PAIRS = {"shares": {"shard": 2}, "stages": {"pp": 2}, "slices": {"tp": 2}, "tokens": {"cp": 2}, "copies": {"dp": 2}}
"""Layouts of two processes."""
MODELS: dict[str, dict[str, Any]] = {
    "block": {},
    "full": {"residual": "full", "num_blocks": None},
    "standard": {"residual": "standard", "num_blocks": None},
}
SLICES = [BLOCK, {"residual": "full"}, {**BLOCK, "tokens": True}]


FOUR = {"steps": 20, "accumulation": 4, "batch_size": 16}


def test_four_processes_are_one(corpus, launched, tmp_path):
    muon = {**FOUR, "steps": 4, "optim": {"optimizer": "muon"}}
    runs = [["muon", configuration(corpus, tmp_path / "muon", parallel={"shard": 2, "tp": 2}, **muon), None]]
    results = launched(tmp_path, {"cases": CASES, "slices": SLICES, "runs": runs}, processes=4)
    for result in results["slices"]:
        assert max(result["logits"], result["gradient"], result.get("prefill", 0.0)) < 1e-10
        assert result["vectors"][1] == result["vectors"][0] / 4
    for result in results["cases"]:
        assert not result["missing"] and max(result["gradient"], result["loss"]) < 1e-10
        assert result["sent"] == [result["table"]] * 2
    train_run(configuration(corpus, tmp_path / "one muon", **muon))
    assert furthest(tmp_path / "muon", tmp_path / "one muon") < 1e-6


@pytest.mark.parametrize("processes", [2, 4])
def test_twenty_steps_of_every_layout_are_one_processs(processes, corpus, launched, tmp_path):
    """Losses and norms of gradients of whole runs in fp64, losses in fp32."""
    layouts, runs = LAYOUTS if processes == 4 else PAIRS, []

    def run(name: str, model: str, parallel: dict[str, int]) -> dict[str, Any]:
        return configuration(corpus, tmp_path / name, model=MODELS[model], parallel=parallel, **FOUR)

    for model in MODELS:
        for name, parallel in layouts.items():
            runs.append([f"{model}, {name}", run(f"{model}, {name}", model, parallel), None])
    single = [[f"{name}, fp32", run(f"{name}, fp32", "block", parallel), None] for name, parallel in layouts.items()]
    launched(tmp_path / "jobs", {"runs": runs, "single": single}, processes=processes)
    for model in MODELS:
        train_run(run(model, model, {}))
        for name in layouts:
            assert furthest(tmp_path / f"{model}, {name}", tmp_path / model) < 1e-10, (model, name)
    train_run(run("fp32", "block", {}), None, torch.float32)
    for name in layouts:
        assert furthest(tmp_path / f"{name}, fp32", tmp_path / "fp32", ["loss"]) < 1e-5, name


MIXED = {
    2: {"experts": {"shard": 2, "ep": 2}},
    4: {
        "experts of shares": {"shard": 4, "ep": 2},
        "one expert each": {"shard": 4, "ep": 4},
        "experts of copies": {"dp": 2, "shard": 2, "ep": 2},
        "experts of stages": {"pp": 2, "shard": 2, "ep": 2, "pp_schedule": "interleaved"},
    },
}
"""Layouts with distributed experts, by the number of processes."""


@pytest.mark.parametrize("processes", MIXED)
def test_twenty_steps_with_distributed_experts_are_one_processs(processes, corpus, launched, tmp_path):
    """Losses and norms of gradients, which are clipped; gradients, of Transformers' distributed experts too."""

    def run(name: str, parallel: dict[str, Any]) -> dict[str, Any]:
        model = {"size": {**MOE, "num_experts": 8}}
        return configuration(
            corpus, tmp_path / name, model=model, parallel=parallel, **{**FOUR, "optim": {"clip": 0.5}}
        )

    layouts = MIXED[processes]
    cases = [{**case, "ep": ep} for case in EXPERTS.values() for ep in {2, processes}]
    jobs = {
        "runs": [[name, run(name, parallel), None] for name, parallel in layouts.items()],
        "single": [[name, run(f"{name}, fp32", parallel), None] for name, parallel in layouts.items()],
        "experts": cases,
        "second opinion": [case for case in EXPERTS.values() if "dtype" not in case],
    }
    results = launched(tmp_path / "jobs", jobs, processes=processes)
    train_run(run("one", {}))
    train_run(run("one, fp32", {}), None, torch.float32)
    for name in layouts:
        assert furthest(tmp_path / name, tmp_path / "one") < 1e-10, name
        assert furthest(tmp_path / f"{name}, fp32", tmp_path / "one, fp32", ["loss"]) < 1e-5, name
    for case, result in zip(cases, results["experts"], strict=True):
        assert result["gradient"] < (1e-10 if case["size"]["family"] in ("qwen3_moe", "gpt_oss") else 1e-5), case
        assert result["messages"] == [3, 2]
    assert max(results["second opinion"]) < 1e-12


def test_a_prompt_of_128k_tokens_is_shared_out(launched, tmp_path):
    """Each of two ranks has half of the vectors; whole and in chunks of 2,048 tokens the logits are one process's."""
    result = launched(tmp_path, {"cases": [], "runs": [], "long": 131_072})["long"]
    assert result["vectors"][1] == result["vectors"][0] / 2
    assert max(result["whole"], result["chunks"]) < 1e-4


PLACES: dict[str, tuple[int, dict[str, int]]] = {
    "plain": (1, {}),
    "shares 2": (2, {"shard": 2}),
    "shares 4": (4, {"shard": 4}),
    "stages 2": (2, {"pp": 2}),
    "stages 2 of shares 2": (4, {"pp": 2, "shard": 2}),
    "slices 2 of shares 2": (4, {"tp": 2, "shard": 2}),
}
PLACES_OF_EXPERTS: dict[str, tuple[int, dict[str, int]]] = {
    "plain": (1, {}),
    "shares 2": (2, {"shard": 2}),
    "experts 2": (2, {"shard": 2, "ep": 2}),
    "experts 2 of shares 4": (4, {"shard": 4, "ep": 2}),
    "experts 2 of stages 2": (4, {"pp": 2, "shard": 2, "ep": 2}),
}


@pytest.mark.parametrize(
    ("places", "more"), [(PLACES, {}), (PLACES_OF_EXPERTS, {"model": {"size": MOE}})], ids=["dense", "mixture"]
)
def test_a_checkpoint_of_any_layout_fills_any_other_bit_for_bit(places, more, corpus, launched, tmp_path):
    """Parameters and optimizer states, AdamW's and Muon's, after a step of training in each layout."""
    values: dict[str, Any] = {"steps": 2, "batch_size": 8, "optim": {"optimizer": "muon"}, "dtype": "fp32", **more}

    def launch(processes: int, jobs: dict[str, Any]) -> Any:
        if processes > 1:
            return launched(tmp_path / str(len(list(tmp_path.iterdir()))), jobs, processes=processes)
        runs = {name: train_run(of, until) for name, of, until in jobs.get("runs", [])}
        return {"runs": runs, "resumed": {name: resume(of) for name, of in jobs.get("resumed", [])}}

    def at(place: str, folder: Path, **more: Any) -> dict[str, Any]:
        return configuration(corpus, folder, parallel=places[place][1], **values, **more)

    for processes in (1, 2, 4):
        runs = [[name, at(name, tmp_path / name), 1] for name, (count, _) in places.items() if count == processes]
        for said in launch(processes, {"runs": runs})["runs"].values():
            assert said.startswith("stopped at step 1 of 2")
    digests = {}
    for processes in (1, 2, 4):
        resumed = []
        for target, (count, _) in places.items():
            for source in places if count == processes else ():
                folder = tmp_path / f"{source} in {target}"
                shutil.copytree(tmp_path / source, folder)
                resumed.append([f"{source} in {target}", at(target, folder, resume=True)])
        digests |= launch(processes, {"resumed": resumed})["resumed"]
    for source in places:
        ours = digests[f"{source} in {source}"]
        assert any(name.endswith("::momentum_buffer") for name in ours) and "model.residual.query" in ours
        for target in places:
            assert digests[f"{source} in {target}"] == ours, (source, target)
