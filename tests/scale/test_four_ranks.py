"""Four gloo processes: stages with shares, copies with shares, longer pipelines, slices (`make test-scale`)."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from test_two_ranks import configuration, furthest
from two_ranks import resume, train_in_fp64

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
SLICES = [BLOCK, {"residual": "full"}, {**BLOCK, "tokens": True}]


def test_four_processes_are_one(corpus, launched, tmp_path):
    four = {"steps": 20, "accumulation": 4, "batch_size": 16}
    runs = [
        [name, configuration(corpus, tmp_path / name, parallel=parallel, **four), None]
        for name, parallel in LAYOUTS.items()
    ]
    muon = {**four, "steps": 4, "optim": {"optimizer": "muon"}}
    runs.append(["muon", configuration(corpus, tmp_path / "muon", parallel={"shard": 2, "tp": 2}, **muon), None])
    results = launched(tmp_path, {"cases": CASES, "slices": SLICES, "runs": runs}, processes=4, seconds=1500)
    for result in results["slices"]:
        assert max(result["logits"], result["gradient"], result.get("prefill", 0.0)) < 1e-10
        assert result["vectors"][1] == result["vectors"][0] / 4
    for result in results["cases"]:
        assert not result["missing"] and max(result["gradient"], result["loss"]) < 1e-10
        assert result["sent"] == [result["table"]] * 2
    train_in_fp64(configuration(corpus, tmp_path / "one", **four), None)
    for name in LAYOUTS:
        assert furthest(tmp_path / name, tmp_path / "one") < 1e-10, name
    train_in_fp64(configuration(corpus, tmp_path / "one muon", **muon), None)
    assert furthest(tmp_path / "muon", tmp_path / "one muon") < 1e-6


def test_a_prompt_of_128k_tokens_is_shared_out(launched, tmp_path):
    """Each of two ranks has half of the vectors; whole and in chunks of 2,048 tokens the logits are one process's."""
    result = launched(tmp_path, {"cases": [], "runs": [], "long": 131_072}, seconds=1500)["long"]
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


def test_a_checkpoint_of_any_layout_fills_any_other_bit_for_bit(corpus, launched, tmp_path):
    """Parameters and optimizer states, AdamW's and Muon's, after a step of training in each layout."""
    values: dict[str, Any] = {"steps": 2, "batch_size": 8, "optim": {"optimizer": "muon"}, "dtype": "fp32"}

    def launch(processes: int, jobs: dict[str, Any]) -> Any:
        if processes > 1:
            return launched(tmp_path / str(len(list(tmp_path.iterdir()))), jobs, processes=processes, seconds=1500)
        runs = {name: train_in_fp64(of, until) for name, of, until in jobs.get("runs", [])}
        return {"runs": runs, "resumed": {name: resume(of) for name, of in jobs.get("resumed", [])}}

    def at(place: str, folder: Path, **more: Any) -> dict[str, Any]:
        return configuration(corpus, folder, parallel=PLACES[place][1], **values, **more)

    for processes in (1, 2, 4):
        runs = [[name, at(name, tmp_path / name), 1] for name, (count, _) in PLACES.items() if count == processes]
        for said in launch(processes, {"runs": runs})["runs"].values():
            assert said.startswith("stopped at step 1 of 2")
    digests = {}
    for processes in (1, 2, 4):
        resumed = []
        for target, (count, _) in PLACES.items():
            for source in PLACES if count == processes else ():
                folder = tmp_path / f"{source} in {target}"
                shutil.copytree(tmp_path / source, folder)
                resumed.append([f"{source} in {target}", at(target, folder, resume=True)])
        digests |= launch(processes, {"resumed": resumed})["resumed"]
    for source in PLACES:
        ours = digests[f"{source} in {source}"]
        assert any(name.endswith("::momentum_buffer") for name in ours) and "model.residual.query" in ours
        for target in PLACES:
            assert digests[f"{source} in {target}"] == ours, (source, target)
