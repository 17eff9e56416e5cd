"""Two gloo processes in one launch: pipelines against one process, whole runs against a run in one, checkpoints."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lines import lines
from safetensors.torch import load_file
from sample_mechanisms import REPRESENTATIVES
from tiny import K3, MOE, NARROW
from two_ranks import train_run

from attnres import UserError
from attnres.cli import main
from attnres.models import build, open_checkpoint
from attnres.scale.plan import Load, plan
from attnres.training import from_dict, to_dict
from attnres.training.records import read_metrics

BLOCK = {"residual": "block", "settings": {"block_size": 3}}
CASES: dict[str, dict[str, Any]] = {
    "1f1b": {**BLOCK, "schedule": "1f1b"},
    "gpipe, a head of its own": {**BLOCK, "schedule": "gpipe", "layers": [8, 0]},
    "everything sent": {**BLOCK, "schedule": "looped_bfs", "cached": False},
    "four stages a rank": {"residual": "block", "settings": {"block_size": 2}, "schedule": "interleaved", "virtual": 4},
    "zero bubble, tied": {**BLOCK, "schedule": "interleaved_zero_bubble", "tie": True},
    "full, there and back": {"residual": "full", "schedule": "zbv", "tie": True},
    "standard": {"residual": "standard", "schedule": "interleaved"},
    "streams": {"residual": "hyper_connections", "schedule": "dualpipev"},
}
VECTORS = {"1f1b": 4, "everything sent": 12, "four stages a rank": 8, "standard": 3, "full, there and back": 13}
"""Vectors a token, by hand. Four stages a rank, P = 2, V = 4, one block a stage: 1 + 3 * 2 and the embedding. There and
back: the embedding and 4 outputs to rank 1, whose 8 own ones come back."""

pytestmark = pytest.mark.long  # tests/training/test_parallel.py has two processes in make test

GROUPED = {"num_key_value_heads": 1}
SLICES: dict[str, dict[str, Any]] = {
    "block": BLOCK,
    "full": {"residual": "full"},
    "streams": {"residual": "hyper_connections"},
    "norms called apart": {**BLOCK, "size": {"family": "gemma2"}},
    "tokens": {**BLOCK, "tokens": True},
    "tokens, sliding": {**BLOCK, "tokens": True, "size": {**GROUPED, "family": "gemma3_text", "sliding_window": 3}},
}


EXPERTS: dict[str, dict[str, Any]] = {
    "a softmax router": {"size": {"family": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 8}},
    "biases, all tokens to two experts": {
        "size": {"family": "gpt_oss", "num_local_experts": 8, "head_dim": 8},
        "skewed": True,
    },
    "in a latent space": {"size": K3},
    "grouped products in fp32": {
        "size": {"family": "mixtral", "num_local_experts": 8},
        "dtype": "float32",
        "implementation": "grouped_mm",
    },
}


def configuration(corpus: Path, out: Path, **values: Any) -> dict[str, Any]:
    base = from_dict(
        {
            "model": {
                "size": {**NARROW, "num_hidden_layers": 4, "num_key_value_heads": 2},
                "residual": "block",
                "num_blocks": 2,
            },
            "data": {"source": str(corpus), "seq_len": 16, "val_windows": 5},
            "optim": {"lr": 0.01},
            "out": str(out),
            "steps": 8,
            "batch_size": 8,
            "accumulation": 2,
            "dtype": "fp32",
            "device": "cpu",
            "val_every": 4,
            "log_every": 1,
            "depth_every": 0,
            "save_every": 50,
        }
    )
    return to_dict(from_dict(values, base))


COUNTED: dict[str, tuple[dict[str, Any], str]] = {
    "shard": ({"shard": 2}, "fp32"),
    "shard, bf16": ({"shard": 2}, "bf16"),
    "tp": ({"tp": 2}, "fp32"),
    "pp": ({"pp": 2}, "fp32"),
    "pp, bf16": ({"pp": 2}, "bf16"),
    "interleaved": ({"pp": 2, "pp_schedule": "interleaved"}, "fp32"),
    "ep": ({"shard": 2, "ep": 2}, "bf16"),
}


def counted_size(name: str) -> dict[str, Any]:
    """Of a mixture one that gives every token to all experts, so that each process has as many."""
    if name == "ep":
        return {**MOE, "num_experts": 2}
    return {**NARROW, "num_hidden_layers": 4, "num_key_value_heads": 2}


DEFAULTS = {"depth_every": 100, "accumulation": 1, "steps": 2}
ALONE: dict[str, dict[str, Any]] = {**{name: {name: 2} for name in ("shard", "pp", "tp", "cp")}, "none": {}}
"""What a command line gives beside a size: `--pp 2` alone, say, or torchrun alone."""
SHARD, STAGES, BESIDE = {"shard": 2}, {"pp": 2}, {"shard": 2, "async_save": True}
MUON = {"optim": {"optimizer": "muon"}, "steps": 4}
CHUNKED = {"loss": "chunked", "gradient_checkpointing": "layer"}
MIXED: dict[str, Any] = {"parallel": {"ep": 2}, "model": {"size": MOE}}
STOPPED: dict[str, dict[str, Any]] = {
    "shares": {"parallel": BESIDE},
    "stages": {"parallel": STAGES},
    "slices": {"parallel": {"tp": 2}},
    "tokens": {"parallel": {"cp": 2}},
    "experts": MIXED,
}


COMPILED: dict[str, dict[str, Any]] = {
    "shares": {"parallel": SHARD, "depth_every": 4},
    "stages": {"parallel": STAGES, **CHUNKED},
    "interleaved": {"parallel": {**STAGES, "pp_schedule": "interleaved"}},
    "experts": MIXED,
}
MLA = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
KDA = {"family": "kimi_linear", "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
KDA |= {"num_key_value_heads": 2, "intermediate_size": 32, "linear_head_dim": 8, "linear_num_heads": 2}
SIX = {"moe_intermediate_size": 8, "num_local_experts": 6, "num_experts_per_tok": 2}
BALANCED = {
    "model": {"size": {**KDA, **MLA, **SIX}, "residual": "block", "num_blocks": 2},
    "optim": {"optimizer": "muon", "balance": "quantile"},
}
SPREAD: dict[str, dict[str, Any]] = {"shares": SHARD, "experts": {**SHARD, "ep": 2}}


KEYS: dict[str, dict[str, Any]] = {"cases": CASES, "slices": SLICES, "experts": EXPERTS}


@pytest.fixture(scope="module")
def both(corpus, launched, once) -> tuple[Path, dict[str, Any]]:
    """The folder of the runs and the results of all cases and runs."""
    root = once("two ranks", lambda root: launched(root, jobs_of(corpus, root)))
    results = json.loads((root / "results.json").read_text())
    named = {key: dict(zip(names, results[key])) for key, names in KEYS.items()}
    return root, {**results, **named}


def jobs_of(corpus: Path, root: Path) -> dict[str, Any]:
    """What two processes are to do in the folder `root`."""

    def run(name: str, out: str | None = None, until: int | None = None, **values: Any) -> list[Any]:
        return [name, configuration(corpus, root / (out or name), **values), until]

    runs = [
        run("shares", parallel=SHARD),
        run("stages", parallel={**STAGES, "pp_schedule": "interleaved"}, **CHUNKED),
        run("muon", parallel=SHARD, **MUON),
        run("slices", parallel={"tp": 2}, gradient_checkpointing="layer"),
        run("tokens", parallel={"cp": 2}, **CHUNKED),
        run("slices, muon", parallel={"tp": 2}, **MUON),
        run("experts", **MIXED, **MUON),
        run("no experts", parallel={"ep": 2}),
        run("experts that do not divide", **{**MIXED, "model": {"size": {**MOE, "num_experts": 7}}}),
        run("adaptive", parallel=STAGES, model={"residual": "adaptive", "num_blocks": None}, steps=4),
        run("4 of 8", "resharded", 4, parallel=SHARD),
        run("8 of 8", "resharded", parallel=STAGES, resume=True),
        run("4 again", "again", 4, parallel=BESIDE, save_every=3),
        run("8 again", "again", parallel=BESIDE, save_every=3, resume=True),
        run("watched", parallel=STAGES, depth_every=5),
        run("too many", parallel={"shard": 4}),
        *(run(f"defaults {name}", parallel=parallel, **DEFAULTS) for name, parallel in ALONE.items()),
        run("few", parallel={**STAGES, "pp_schedule": "dualpipev"}),
        run("both", parallel={"tp": 2, "cp": 2, "dp": 1}),
        run("whole", parallel={"async_save": True}),
        run("watched slices", parallel={"tp": 2}, depth_every=5),
        run("watched tokens", parallel={"cp": 2}, depth_every=5),
        run("short", parallel={"cp": 2}, data={"seq_len": 1}),
        run("finished", "shares", parallel=SHARD),
    ]
    counted = [
        [
            name,
            configuration(
                corpus, root / f"counted {name}", parallel=parallel, dtype=dtype, model={"size": counted_size(name)}
            ),
        ]
        for name, (parallel, dtype) in COUNTED.items()
    ]
    jobs = {"cases": list(CASES.values()), "slices": list(SLICES.values()), "plan": True, "runs": runs}
    jobs["shares"] = REPRESENTATIVES
    jobs["experts"] = [{**case, "ep": 2} for case in EXPERTS.values()]
    jobs["counted"] = counted
    jobs["compiled"] = [
        [name, configuration(corpus, root / f"compiled {name}", compile=True, **layout)]
        for name, layout in COMPILED.items()
    ]
    jobs["single"] = [run("bf16", parallel=SHARD, dtype="bf16")]
    jobs["single"] += [run(f"balanced {name}", parallel=parallel, **BALANCED) for name, parallel in SPREAD.items()]
    for name, layout in STOPPED.items():
        short, parts = {**layout, "steps": 4, "save_every": 3}, f"{name} in parts"
        whole = run(f"{name} at once", **short)
        jobs["single"] += [whole, run(f"2 of 4 {name}", parts, 2, **short), run(parts, resume=True, **short)]
    return jobs


@pytest.fixture(scope="module")
def alone(both, once) -> Path:
    """The runs "one", "muon", "adaptive" and "experts" in this one process."""
    root, _ = both
    jobs = {name: values for name, values, _ in json.loads((root / "jobs.json").read_text())["runs"]}

    def train_alone(_: Path) -> None:
        for name, out in {"shares": "one", **{name: f"one {name}" for name in ("muon", "adaptive", "experts")}}.items():
            train_run({**jobs[name], "parallel": {}, "out": str(root / out)})

    once("one rank", train_alone)
    return root


def furthest(ours: Path, theirs: Path, names: Sequence[str] = ("loss", "grad_norm", "penalty")) -> float:
    """The largest difference of losses and gradient norms between two runs of the same lines."""
    left, right = (read_metrics(run / "metrics.jsonl") for run in (ours, theirs))
    assert [(line["kind"], line["step"]) for line in left] == [(line["kind"], line["step"]) for line in right]
    return max(abs(a.get(name, 0) - b.get(name, 0)) for a, b in zip(left, right) for name in names)


@pytest.mark.parametrize("case", CASES)
def test_a_pipeline_is_one_process(both, case):
    result = both[1]["cases"][case]
    assert not result["missing"]
    assert result["gradient"] < 1e-10 and result["loss"] < 1e-10
    assert result["sent"] == [result["table"]] * 2  # forward, and as much back
    assert result["table"] == VECTORS.get(case, result["table"])


def test_receive_buffers_come_and_go(both):
    for result in both[1]["cases"].values():
        for buffers in result["buffers"]:
            assert buffers["peak"] <= 0.75 * buffers["stock"]
    # 1F1B: rank 1 receives four vectors for one microbatch at a time (2 x 5 tokens, 16 wide, fp64), rank 0 gradients.
    assert [b["peak"] for b in both[1]["cases"]["1f1b"]["buffers"]] == [4 * 10 * 16 * 8] * 2


def test_caches_hold_slots_only_where_a_later_stage_of_the_rank_reads_them(both):
    cases = both[1]["cases"]
    assert cases["1f1b"]["cache"] == cases["everything sent"]["cache"] == [0, 0]
    assert min(cases["four stages a rank"]["cache"]) > 0


@pytest.mark.parametrize("residual", REPRESENTATIVES)
def test_a_mechanism_of_each_shape_in_shares_is_one_process(both, residual):
    assert both[1]["shares"][residual] < 1e-10


@pytest.mark.parametrize("case", SLICES)
def test_a_model_in_slices_is_one_process(both, case):
    """With tokens that do not divide; in a training pass, a prefill in chunks, and words that are generated."""
    result = both[1]["slices"][case]
    bound = 1e-6 if "family" in SLICES[case].get("size", {}) else 1e-10  # Gemma's norms are fp32
    assert max(result["logits"], result["gradient"], result.get("prefill", 0.0)) < bound
    whole, sliced = result["vectors"]
    assert sliced == whole / 2  # vectors a token before the head
    assert result.get("generated", True) and result.get("heads", 2) == 2  # of four heads' keys and values


@pytest.mark.parametrize("case", EXPERTS)
def test_distributed_experts_are_one_process(both, case):
    """Whatever the loads, with three messages a layer in a forward pass and two in its backward."""
    result, settings = both[1]["experts"][case], EXPERTS[case]
    rounded = "dtype" in settings or settings["size"] is K3  # whose router and KDA are in fp32
    assert result["loss"] < (1e-6 if "dtype" in settings else 1e-8 if rounded else 1e-10)
    assert result["gradient"] < (1e-5 if rounded else 1e-10)
    assert result["messages"] == [3, 2]
    if settings.get("skewed"):
        tokens = 2 * 2 * 7  # of two processes
        assert all(load == [tokens, tokens, 0, 0, 0, 0, 0, 0] for load in result["loads"])


def test_transformers_own_plan_is_followed(both):
    assert both[1]["plan"]["logits"] < 1e-6 and both[1]["plan"]["words"] == 0


@pytest.mark.parametrize("layout", ["shares", "stages", "slices", "tokens"])
def test_steps_in_any_layout_are_those_of_one_process(both, alone, layout):
    assert furthest(alone / layout, alone / "one") < 1e-10


def test_compiled_parts_are_those_of_one_process(both, corpus, tmp_path):
    """One graph of attention and one of the MLP on each process, whatever the steps, the losses of held-out windows and
    the recorded passes in between. Distributed experts are called between two graphs."""
    root, results = both
    for name, out in (("shares", "one"), ("experts", "one mixture")):
        train_run(configuration(corpus, tmp_path / out, **{**COMPILED[name], "parallel": {}}))

    def curve(run: Path) -> list[Any]:
        lines = (line for line in read_metrics(run / "metrics.jsonl") if line["kind"] in ("train", "val"))
        return [(line["step"], line["loss"], line.get("grad_norm", 0.0)) for line in lines]

    for name in COMPILED:
        ours, mixture = curve(root / f"compiled {name}"), name == "experts"
        assert results["compiled"][name] == (3 if mixture else 2) and len(ours) == 10
        for each, expected in zip(ours, curve(tmp_path / ("one mixture" if mixture else "one")), strict=True):
            assert each == pytest.approx(expected, abs=1e-9)


def test_sharded_experts_are_orthogonalised_and_balanced_as_on_one_process(both, corpus, tmp_path):
    assert isinstance(train_run(configuration(corpus, tmp_path / "one", **BALANCED), None, torch.float32), float)
    one, *others = (
        [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "train"]
        for run in (tmp_path / "one", *(both[0] / f"balanced {name}" for name in SPREAD))
    )
    assert len(one) == 8
    for other in others:
        for a, b in zip(one, other, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], abs=1e-3)
            assert a["expert_load"] == pytest.approx(b["expert_load"], abs=0.05)
        assert one[0]["expert_load"] == other[0]["expert_load"]


def test_muon_of_distributed_experts_is_muon(both, alone):
    assert furthest(alone / "experts", alone / "one experts") < 1e-10
    assert json.loads((alone / "experts" / "config.json").read_text())["parallel"]["shard"] == 2


def test_muon_by_owners_is_muon(both, alone):
    for layout in ("muon", "slices, muon"):
        assert furthest(alone / layout, alone / "one muon") < 1e-6


@pytest.mark.parametrize("name", COUNTED)
def test_a_plan_is_what_a_run_counts(both, corpus, name):
    """Bytes of parameters, gradients and moments on the fullest rank; the most that its backward passes need at once;
    those that a rank sends in a step."""
    counted, size = both[1]["counted"][name], counted_size(name)
    with torch.device("meta"):
        words = json.loads((corpus / "header.json").read_text())["vocab_size"]
        model = build(size, "block", vocab_size=words, max_positions=16, settings={"num_blocks": 2})
    parallel, dtype = COUNTED[name]
    layout = {"schedule": parallel.get("pp_schedule", "1f1b"), **parallel}
    layout.pop("pp_schedule", None)
    batch, itemsize = (2 if "shard" in layout else 4), (4 if dtype == "fp32" else 2)
    (planned,) = plan(model, Load(2, context=16, batch=batch, microbatches=2, itemsize=itemsize), **layout)
    assert planned.states == counted["states"]
    assert planned.activations + planned.sources == pytest.approx(max(counted["saved"]), rel=0.05)
    assert planned.stage_bytes == counted["stages"]
    if "pp" not in layout:  # where the residual's gradients alone are summed
        sent = planned.share_bytes + planned.slice_bytes + planned.expert_bytes
        assert sent == pytest.approx(counted["collectives"], rel=0.01)
        assert planned.expert_messages == (5 * 4 * 2 if name == "ep" else 0)  # a layer of each micro-batch


def test_shares_in_bf16_learn_as_one_process(both, corpus, tmp_path):
    train_run(configuration(corpus, tmp_path / "one", dtype="bf16"), None, torch.float32)
    assert furthest(both[0] / "bf16", tmp_path / "one", ["loss"]) < 0.02


def test_a_penalty_counts_once(both, alone):
    assert furthest(alone / "adaptive", alone / "one adaptive") < 1e-10
    assert all(
        line["penalty"] > 0 for line in read_metrics(alone / "adaptive" / "metrics.jsonl") if line["kind"] == "train"
    )


def test_the_model_at_the_end_is_whole(both, alone):
    ours, theirs = (load_file(alone / run / "model" / "model.safetensors") for run in ("stages", "one"))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-9, atol=1e-9)
    summaries = [json.loads((alone / run / "summary.json").read_text()) for run in ("stages", "shares", "one")]
    for name in ("parameters", "extra_parameters", "step", "tokens"):
        assert len({summary[name] for summary in summaries}) == 1


@pytest.mark.parametrize("layout", STOPPED)
def test_a_checkpoint_goes_on_bit_for_bit_in_its_own_layout(both, layout):
    root, results = both
    assert results["single"][f"2 of 4 {layout}"].startswith("stopped at step 2 of 4, saved in ")
    whole, parts = (root / f"{layout} {how}" for how in ("at once", "in parts"))
    assert lines(parts) == lines(whole)
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (parts, whole))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_checkpoint_goes_on_in_another_layout(both, alone):
    assert both[1]["runs"]["4 of 8"].startswith("stopped at step 4 of 8, saved in ")
    assert furthest(alone / "resharded", alone / "again") < 1e-5
    root = both[0]
    before = read_metrics(root / "again" / "metrics.jsonl")
    assert [line["step"] for line in before if line["kind"] == "train"] == list(range(1, 9))
    assert furthest(root / "again", alone / "one") < 1e-5  # the model of a checkpoint goes on in fp32


def test_a_checkpoint_in_shares_is_read_by_one_process_and_refused_when_damaged(both, corpus, tmp_path):
    root, _ = both
    values = configuration(corpus, tmp_path / "one", resume=True)
    shutil.copytree(root / "resharded", tmp_path / "one")
    (tmp_path / "one" / "summary.json").unlink()
    with pytest.raises(UserError, match=r"is a sharded checkpoint, .* attnres export .* --weights"):
        open_checkpoint(tmp_path / "one" / "checkpoint")
    main(["export", str(tmp_path / "one" / "checkpoint"), str(tmp_path / "exported"), "--weights"])
    exported_model = open_checkpoint(tmp_path / "exported")
    assert exported_model.residual == "block" and exported_model.tokenizer("a").input_ids
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    shard = next((tmp_path / "one" / "checkpoint" / "shares").glob("*.distcp"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "is not what was saved: the checkpoint is damaged" in train_run(values)
    shard.write_bytes(content)
    config = tmp_path / "one" / "checkpoint" / "model" / "config.json"
    described = config.read_text()
    config.write_text(json.dumps(json.loads(described) | {"residual_settings": {"num_blocks": 4}}))
    assert "has the residual block {'num_blocks': 4}, expected block {'num_blocks': 2}" in train_run(values)
    config.write_text(described)
    assert isinstance(train_run(values), float)
    model = load_file(tmp_path / "one" / "model" / "model.safetensors")
    other = load_file(root / "resharded" / "model" / "model.safetensors")
    assert all(torch.equal(model[name].float(), other[name].float()) for name in other)
    assert all(torch.equal(exported[name].float(), other[name].float()) for name in other)


@pytest.mark.parametrize("name", ALONE)
def test_a_layout_alone_runs_with_defaults_everywhere_else(both, name):
    root, results = both
    losses, folder = results["runs"], root / f"defaults {name}"
    assert losses[f"defaults {name}"] == pytest.approx(losses["defaults none"], rel=1e-6)
    config = json.loads((folder / "config.json").read_text())
    assert config["accumulation"] == (2 if name == "pp" else 1) and config["depth_every"] == 100
    assert config["parallel"]["dp"] == (2 if name == "none" else None)
    measured = {line["kind"] for line in read_metrics(folder / "metrics.jsonl")}
    assert ("depth" in measured) == (name in ("shard", "none")), "no process sees all depths of a model that is cut"


def test_mistakes_are_one_sentence_on_the_first_process(both):
    runs = both[1]["runs"]
    assert "give --depth-every 0" in runs["watched"]
    assert "there are 2 processes: start a multiple of 4" in runs["too many"]
    assert "parallel.tp and parallel.cp are above 1" in runs["both"]
    assert "parallel.async_save is on and every process has the whole" in runs["whole"]
    assert "parallel.tp above 1" in runs["watched slices"]
    assert "parallel.cp above 1" in runs["watched tokens"]
    assert "data.seq_len is 1: too few tokens for 2 processes" in runs["short"]
    assert "2 microbatches a step (accumulation) are too few for the schedule dualpipev" in runs["few"]
    assert "holds a finished run" in runs["finished"]
    assert "ep is 2 and AttnResQwen3ForCausalLM has no layers of stacked experts" in runs["no experts"]
    assert "ep is 2 and model.layers.0.mlp.experts has 7 experts" in runs["experts that do not divide"]
    assert not any((both[0] / name).exists() for name in ("no experts", "experts that do not divide"))
