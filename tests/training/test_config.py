"""A configuration is data: it goes to files and back, and what cannot run is refused before anything happens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnres.commands.train import Train
from attnres.errors import UserError
from attnres.flags import config_file, parse
from attnres.residuals import changed_settings, settings_of
from attnres.scale.cut import cut_of, placed
from attnres.training import TrainConfig, from_dict, to_dict
from attnres.training.config import differences, merged_settings
from attnres.training.prepare import check, prepare_run
from attnres.typed import leaves


def test_the_defaults_can_run() -> None:
    check(prepare_run(TrainConfig()).config)


def test_dict_and_back_is_the_same() -> None:
    config = from_dict({"optim": {"betas": [0.8, 0.9], "lr": 1}, "model": {"settings": {"num_blocks": 3}}, "seed": 7})
    assert config.optim.betas == (0.8, 0.9) and isinstance(config.optim.lr, float)
    assert from_dict(to_dict(config)) == config


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.yaml", "steps: 7\noptim:\n  lr: 1e-3\n  betas: [0.9, 0.99]\nmodel:\n  size: {family: qwen3}\n"),
        ("run.toml", 'steps = 7\n[optim]\nlr = 1e-3\nbetas = [0.9, 0.99]\n[model.size]\nfamily = "qwen3"\n'),
        (
            "run.json",
            '{"steps": 7, "optim": {"lr": 0.001, "betas": [0.9, 0.99]}, "model": {"size": {"family": "qwen3"}}}',
        ),
    ],
)
def test_files_overlay_what_is_there(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    values, _ = config_file(["--config", str(tmp_path / name)])
    config = from_dict(values, TrainConfig(seed=5))
    assert (config.seed, config.steps, config.optim.lr, config.optim.betas) == (5, 7, 0.001, (0.9, 0.99))
    assert config.model.size == {"family": "qwen3"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz: 7", "unknown configuration key 'stepz': did you mean 'steps'"),
        ("optim: {lrr: 7}", "did you mean 'optim.lr'"),
        ("optim: 7", "expected keys and values under it"),
        ("steps: many", "steps is 'many': expected a whole number"),
        ("steps: true", "steps is True: expected a whole number"),
        ("compile: 1", "expected true or false"),
        ("optim: {lr: fast}", "optim.lr is 'fast': expected a number"),
        ("optim: {betas: [0.9]}", "expected a list of 2 numbers"),
    ],
)
def test_values_that_say_nothing_sensible_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        from_dict(config_file(["--config", str(tmp_path / "a.yaml")])[0])


def test_text_in_a_file_stays_text_and_numbers_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model: {settings: {a: 'nan', b: '7', c: 7, d: 1e-3, e: true, f: 0.5}}\n")
    settings = from_dict(config_file(["--config", str(tmp_path / "a.yaml")])[0]).model.settings
    assert settings == {"a": "nan", "b": "7", "c": 7, "d": 0.001, "e": True, "f": 0.5}
    assert [type(value) for value in settings.values()] == [str, str, int, float, bool, float]


def test_a_size_has_the_nested_fields_of_a_hugging_face_config(tmp_path: Path) -> None:
    text = "model:\n  size: {family: qwen3, rope_parameters: {rope_theta: 1e6}, layer_types: [full_attention]}\n"
    (tmp_path / "a.yaml").write_text(text, encoding="utf-8")
    config = from_dict(config_file(["--config", str(tmp_path / "a.yaml")])[0])
    size = {"family": "qwen3", "rope_parameters": {"rope_theta": 1e6}, "layer_types": ["full_attention"]}
    assert config.model.size == size and from_dict(to_dict(config)) == config
    with pytest.raises(UserError, match=r"model\.size is .*: expected text or keys and values or nothing"):
        (tmp_path / "a.yaml").write_text("model: {size: {1: 2}}", encoding="utf-8")
        from_dict(config_file(["--config", str(tmp_path / "a.yaml")])[0])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 0}, "steps is 0: it must be a number above 0"),
        ({"batch_size": -1}, "batch_size is -1"),
        ({"seed": -1}, "seed is -1: it must be 0 or more"),
        ({"data": {"seq_len": 0}}, "data.seq_len is 0"),
        ({"data": {"limit": 0}}, "data.limit is 0"),
        ({"data": {"held_out": 0.0}}, "data.held_out is 0.0"),
        ({"optim": {"lr": 0.0}}, "optim.lr is 0.0"),
        ({"optim": {"lr": float("nan")}}, "optim.lr is nan"),
        ({"optim": {"clip": -1.0}}, "optim.clip is -1.0"),
        ({"optim": {"warmup": 10.0}}, "optim.warmup is 10.0: it is a fraction"),
        ({"optim": {"betas": (0.9, 1.0)}}, "decay rates lie from 0 to below 1"),
        ({"optim": {"schedule": "wsd", "warmup": 0.5, "decay": 0.6}}, "together exceed the run"),
        ({"optim": {"schedule": "cosin"}}, "unknown schedule 'cosin': did you mean 'cosine'"),
        ({"optim": {"optimizer": "moun"}}, "unknown optimizer 'moun': did you mean 'muon'"),
        ({"dtype": "fp16"}, "unknown dtype 'fp16'"),
        ({"device": "gpu"}, "unknown device 'gpu'"),
        ({"track": "wanbd"}, "unknown track 'wanbd': did you mean 'wandb'"),
        ({"model": {"size": "nanoo"}}, "unknown size 'nanoo': did you mean 'nano'"),
        ({"model": {"residual": "blokc"}}, "unknown residual 'blokc': did you mean 'block'"),
        (
            {"model": {"residual": "full", "num_blocks": 2}},
            "unknown setting of residual 'full' 'num_blocks': .*valid are",
        ),
        ({"model": {"settings": {"num_blcks": 2}}}, "'num_blcks': did you mean 'num_blocks'"),
        ({"model": {"residual": "standard", "settings": {"a": 2}}}, "unknown setting of residual 'standard' 'a'"),
        ({"seed": 5_000_000_000}, "seed is 5000000000: it must be at most 4294967295"),
        ({"model": {"block_size": 2, "settings": {"block_size": 3}}}, "give one of the two"),
        ({"batch_size": 6, "accumulation": 4}, "use a multiple of 4, e.g. 4 or 8"),
        ({"steps": 8, "keep_at": (4, 9)}, r"keep_at is \[4, 9\]: the run has 8 steps, give some from 1 to 8"),
        ({"parallel": {"pp_layers": (1, -1)}}, "parallel.pp_layers is .*: it must be 0 or more"),
        (
            {"finetune": {"init_from": "x", "lora_rank": 4}},
            "finetune.lora_rank is 4 and would have no effect: give train_only lora, or leave it out",
        ),
        (
            {"finetune": {"init_from": "x", "distill_temperature": 2}},
            "finetune.distill_temperature is 2.* would have no effect: give a distill_weight above 0, or leave it out",
        ),
        ({"optim": {"muon_lr": 0.1}}, "optim.muon_lr is 0.1 and would have no effect: give optimizer muon, or leave"),
        ({"optim": {"momentum": 0.9}}, "optim.momentum is 0.9 and would have no effect: give optimizer muon, or leave"),
        ({"optim": {"decay": 0.1}}, "optim.decay is 0.1 and would have no effect: give schedule wsd, or leave it out"),
    ],
)
def test_what_cannot_run_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(from_dict(values))


def test_the_first_and_the_last_stage_may_have_no_layer() -> None:
    check(from_dict({"parallel": {"pp": 3, "pp_layers": (0, 6, 0)}, "accumulation": 4}), world_size=3)
    with pytest.raises(UserError, match=r"\[3, 0, 3\]: .* only the first .* and the last .* may be 0"):
        cut_of((3, 0, 3), placed(3, 3))


def test_sizes_must_divide_among_processes() -> None:
    with pytest.raises(UserError, match=r"batch_size 8 .* accumulation 2 x 3 processes: use a multiple of 6"):
        check(from_dict({"accumulation": 2, "parallel": {"dp": 3}}), world_size=3)


GIVEN: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "torchrun alone": ({}, 2, {"parallel.dp": 2}),
    "pp": ({"parallel": {"pp": 2}}, 2, {"accumulation": 2}),
    "pp of three, of a batch of eight": ({"parallel": {"pp": 3}}, 3, {"accumulation": 4}),
    "pp and dp": ({"parallel": {"pp": 4, "dp": 2}}, 8, {"accumulation": 4}),
    "more stages than sequences": ({"parallel": {"pp": 12}}, 12, {"accumulation": 12, "batch_size": 12}),
    "interleaved": ({"parallel": {"pp": 2, "pp_schedule": "interleaved"}}, 2, {}),
    "pp_virtual": ({"parallel": {"pp": 2, "pp_virtual": 2}}, 2, {"parallel.pp_schedule": "interleaved"}),
    "layers of four stages": (
        {"parallel": {"pp": 2, "pp_layers": [3, 3, 3, 3]}},
        2,
        {"parallel.pp_virtual": 2, "parallel.pp_schedule": "interleaved"},
    ),
    "zero bubble": ({"parallel": {"pp": 2, "pp_schedule": "zbv"}}, 2, {"loss": "whole"}),
    "ep": ({"parallel": {"ep": 2}}, 4, {"parallel.shard": 2}),
    "shard of sixteen": ({"parallel": {"shard": 16}}, 16, {"batch_size": 16}),
    "accumulation": ({"accumulation": 3}, 1, {"batch_size": 9}),
    "a decay of the whole run": ({"optim": {"schedule": "wsd", "decay": 1.0}}, 1, {"optim.warmup": 0.0}),
    "a warm-up of the whole run": ({"optim": {"schedule": "wsd", "warmup": 1.0}}, 1, {"optim.decay": 0.0}),
    "what fits": ({"parallel": {"pp": 2, "dp": 2}, "accumulation": 2, "depth_every": 0}, 4, {}),
}
"""Values that a user gives, the number of processes, and the defaults that give way."""


@pytest.mark.parametrize("name", GIVEN)
def test_a_default_that_stands_in_the_way_gives_way_and_is_said(name: str) -> None:
    values, processes, changed = GIVEN[name]
    known = dict(leaves(to_dict(from_dict(values))))
    filled = ("name", "out", "model.size", "model.settings", "data.tokenizer", "model.residual_file")
    prepared = prepare_run(from_dict(values), processes)
    config, notes = prepared.config, prepared.notes
    found = {
        key: value for key, value in leaves(to_dict(config)) if value != known.get(key) and not key.startswith(filled)
    }
    assert found == changed
    assert all(any(note.startswith(f"{key} is {value}: ") for note in notes) for key, value in changed.items())
    by_depth = "depth_every" not in values and "pp" in values.get("parallel", {})
    assert len(notes) == len(changed) + by_depth and any("depth_every" in note for note in notes) == by_depth
    assert prepare_run(config, processes).config == config, "nothing is left to change"


def test_what_was_given_does_not_give_way() -> None:
    with pytest.raises(UserError, match="batch_size 12 does not divide"):
        prepare_run(from_dict({"batch_size": 12, "parallel": {"dp": 8}}), 8)
    with pytest.raises(UserError, match="steps is -1"):
        prepare_run(from_dict({"steps": -1}), 2)
    pipeline = from_dict({"parallel": {"pp": 2, "pp_schedule": "dualpipev"}, "accumulation": 2})
    with pytest.raises(UserError, match=r"2 microbatches .* too few .* at least 4"):
        prepare_run(pipeline, 2)


def test_a_seed_leaves_room_for_the_ranks() -> None:
    check(from_dict({"seed": 2**32 - 2, "parallel": {"dp": 2}}), world_size=2)
    with pytest.raises(UserError, match="at most 4294967294"):
        check(from_dict({"seed": 2**32 - 1}), world_size=2)


def test_a_value_of_the_wrong_type_is_refused_in_code_too() -> None:
    with pytest.raises(UserError, match=r"optim\.lr is 'x': expected a number"):
        config = TrainConfig()
        config.optim.lr = "x"  # ty: ignore[invalid-assignment]
        check(config)


def test_plain_flags_become_settings() -> None:
    config = prepare_run(from_dict({"model": {"num_blocks": 3}, "seed": 2})).config
    assert changed_settings("block", config.model.settings) == {"num_blocks": 3} and config.model.num_blocks is None
    assert (config.name, config.out) == ("block-seed2", "runs/block-seed2")
    assert merged_settings(config.model) == config.model.settings


def test_a_run_has_every_setting_of_its_residual_and_is_the_one_that_had_those_that_were_given() -> None:
    now = to_dict(prepare_run(from_dict({"model": {"num_blocks": 3}})).config)
    assert now["model"]["settings"] == {**settings_of("block"), "num_blocks": 3}
    assert to_dict(prepare_run(from_dict(now)).config) == now
    earlier = {**now, "model": {**now["model"], "settings": {"num_blocks": 3}}}
    assert differences(now, earlier) == differences(earlier, now) == []
    other = {**now, "model": {**now["model"], "settings": {"num_blocks": 3, "read_scale": "sum"}}}
    assert differences(now, other) == ["model.settings.read_scale"]


def test_flags_of_the_command_line() -> None:
    config = parse("train", Train, ["--model.size", "100m", "--optim.lr=1e-4", "--resume", "--seed", "3"])
    assert (config.model.size, config.optim.lr, config.resume, config.seed) == ("100m", 1e-4, True, 3)


def test_what_changes_nothing_in_two_runs_is_no_difference() -> None:
    """As runs of an earlier version have it, that were given it by a default."""
    ours, theirs = to_dict(TrainConfig()), to_dict(from_dict({"optim": {"muon_lr": 0.01, "decay": 0.3}}))
    assert differences(ours, theirs) == []
    theirs["optim"]["schedule"] = "wsd"
    assert differences(ours, theirs) == ["optim.schedule", "optim.decay"]


def test_differences_name_what_changes_a_number(configure: Callable[..., TrainConfig]) -> None:
    ours, theirs = to_dict(configure()), to_dict(configure(out="b", optim={"lr": 0.5}, resume=True, save_every=1))
    assert differences(ours, theirs) == ["optim.lr"]
    sizes = ["nano", {"family": "llama", "hidden_size": 8}, {"family": "llama", "hidden_size": 16}]
    named, small, large = ({**ours, "model": {**ours["model"], "size": size}} for size in sizes)
    assert differences(named, small) == ["model.size"] and differences(small, large) == ["model.size.hidden_size"]


def test_an_option_that_is_gone_may_hold_its_default_alone() -> None:
    """A run of an earlier version goes on where the option did nothing."""
    config = from_dict({"optim": {"residual_hold": 0.0, "residual_warmup": 0.0, "lr": 0.5}})
    assert config == from_dict({"optim": {"lr": 0.5}})
    now, earlier = to_dict(config), to_dict(config)
    earlier["optim"] |= {"residual_hold": 0.0, "residual_warmup": 0.0}
    assert differences(now, earlier) == differences(earlier, now) == []
    earlier["optim"]["residual_hold"] = 0.05
    assert differences(now, earlier) == ["optim.residual_hold"]
    with pytest.raises(UserError, match=r"optim\.residual_hold is 0\.05"):
        from_dict({"optim": {"residual_hold": 0.05}})
    with pytest.raises(UserError, match=r"loss is liger, .*chunked"):
        from_dict({"loss": "liger"})
