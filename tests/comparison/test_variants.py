"""Variants are one short text each; what is not understood is refused with the nearest valid name."""

import pytest

from attnres.comparison.plan import VariantSpec, parse_variant, parse_variants
from attnres.errors import UserError


@pytest.mark.parametrize(
    ("text", "variant", "label"),
    [
        ("standard", VariantSpec("standard"), "standard"),
        ("block:num_blocks=6", VariantSpec("block", {"num_blocks": 6}), "block-num_blocks6"),
        ("block@lr=0.003", VariantSpec("block", {}, 0.003), "block-lr0.003"),
        ("block:block_size=2@lr=3e-3", VariantSpec("block", {"block_size": 2}, 0.003), "block-block_size2-lr0.003"),
        ("block:block_size=2,key_norm_eps=1e-5", VariantSpec("block", {"block_size": 2, "key_norm_eps": 1e-5}), None),
        (
            "full@train_only=lora,lr=0.01,residual_lr=0.1",
            VariantSpec("full", {}, 0.01, {"train_only": "lora", "residual_lr": 0.1}),
            "full-train_onlylora-residual_lr0.1-lr0.01",
        ),
        ("full:read_scale=sum", VariantSpec("full", {"read_scale": "sum"}), "full-read_scalesum"),
    ],
)
def test_a_variant_is_residual_settings_and_rate(text, variant, label):
    assert parse_variant(text) == variant
    assert label is None or variant.label == label


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("blokc", "did you mean 'block'"),
        ("block:num_block=6", "did you mean 'num_blocks'"),
        ("standard:num_blocks=6", "unknown setting of residual 'standard'"),
        ("block:num_blocks", "is not SETTING=VALUE"),
        ("block:", "is not SETTING=VALUE"),
        ("block:num_blocks=6,", "is not SETTING=VALUE"),
        ("block@0.003", "'0.003' is not NAME=VALUE"),
        ("block@train_onyl=lora", "unknown name after '@' 'train_onyl': did you mean 'train_only'"),
        ("block@lr=fast", "expected a number above 0"),
        ("block@lr=-1", "expected a number above 0"),
        ("full:read_scale=../../x", "the value '../../x' of read_scale has other characters than letters"),
        ("full:read_scale=a\\b", "has other characters than letters"),
        ("", "is not understood"),
        (":num_blocks=6", "is not understood"),
    ],
)
def test_what_is_not_understood_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        parse_variant(text)


def test_rates_multiply_the_variants_that_have_none():
    labels = [variant.label for variant in parse_variants(["standard", "block@lr=0.1"], [0.001, 0.01])]
    assert labels == ["standard-lr0.001", "standard-lr0.01", "block-lr0.1"]


def test_a_variant_given_twice_is_refused():
    with pytest.raises(UserError, match="'block' is given 2 times"):
        parse_variants(["block", "full", "block"])
    with pytest.raises(UserError, match="no variant given"):
        parse_variants([])
