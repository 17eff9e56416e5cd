"""Four gloo processes: stages with shares, copies with shares, longer pipelines (`make test-scale`)."""

import pytest
from test_two_ranks import configuration, furthest
from two_ranks import train_in_fp64

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
}


def test_four_processes_are_one(corpus, launched, tmp_path):
    four = {"steps": 20, "accumulation": 4, "batch_size": 16}
    runs = [
        [name, configuration(corpus, tmp_path / name, parallel=parallel, **four), None]
        for name, parallel in LAYOUTS.items()
    ]
    results = launched(tmp_path, {"cases": CASES, "runs": runs}, processes=4, seconds=1500)
    for result in results["cases"]:
        assert not result["missing"] and max(result["gradient"], result["loss"]) < 1e-10
        assert result["sent"] == [result["table"]] * 2
    train_in_fp64(configuration(corpus, tmp_path / "one", **four), None)
    for name in LAYOUTS:
        assert furthest(tmp_path / name, tmp_path / "one") < 1e-10, name
