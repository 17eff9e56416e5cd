"""The sizes of studies, as data: from seconds for the tests to one GPU a run."""

import dataclasses
from dataclasses import dataclass
from typing import Any

Size = str | dict[str, Any]


def qwen3(width: int, layers: int, heads: int, hidden: int) -> dict[str, Any]:
    """Return a Qwen3 of this shape with half as many key-value heads, or one."""
    return {
        "family": "qwen3",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "head_dim": width // heads,
        "intermediate_size": hidden,
        "tie_word_embeddings": True,
    }


def gpt2(width: int, layers: int, heads: int) -> dict[str, Any]:
    """Return a GPT-2 of this shape without dropout."""
    fields = {"n_embd": width, "n_layer": layers, "n_head": heads}
    return {"family": "gpt2", **fields, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


@dataclass(frozen=True)
class Preset:
    """A size of studies.

    Attributes:
        train: the recipe, values that override the defaults of a training run.
        many: steps in studies of many mechanisms.
        seeds: default number of runs in a group. floor: number of runs of the standard model in the noise study.
        ladder: sizes for the scaling study, ascending, and their tokens a parameter.
        layers: depths in the study of depth and width, with the number of parameters of the recipe's layers; see
            `shape`.
        deep: many narrow layers. gpt2: the nanoGPT study's family at this size.
        small: factor on the steps of studies that train no decoder.
        flops_per_s: assumed speed of a run if this machine lacks the preset's device.
        most: largest number of variants from a long list; None is all.
        timing_s: seconds of an arm's interleaved timing.
    """

    about: str
    train: dict[str, Any]
    many: int
    seeds: int
    floor: int
    ladder: tuple[dict[str, Any], ...]
    tokens_a_parameter: float
    layers: tuple[int, ...]
    deep: dict[str, Any]
    gpt2: Size
    small: float
    flops_per_s: float
    most: int | None = None
    timing_s: float = 60.0

    @property
    def steps(self) -> int:
        """Return the steps of a run of the recipe."""
        return int(self.train["steps"])

    @property
    def depth(self) -> int:
        """Return the number of layers of the recipe's model."""
        return int(self._fields["num_hidden_layers"])

    @property
    def width(self) -> int:
        """Return the width of the recipe's model, at which its learning rates were found."""
        return int(self._fields["hidden_size"])

    @property
    def layer_parameters(self) -> float:
        """Return the parameters of all layers of the recipe's model, as `shape` counts them."""
        return 12.0 * self.depth * self.width**2

    def of_depth(self, layers: int) -> dict[str, Any]:
        """Return the recipe's model with this number of layers."""
        return {**self._fields, "num_hidden_layers": layers}

    @property
    def _fields(self) -> dict[str, Any]:
        from attnres.models.build import SIZES

        size = self.train["model"]["size"]
        return SIZES[size] if isinstance(size, str) else size


_TINY = qwen3(16, 2, 2, 32)

SECONDS = Preset(
    about="a model of a few thousand parameters for a few steps: what the tests run",
    train={
        "model": {"size": _TINY},
        "data": {"seq_len": 16, "tokenizer": "bpe:300", "val_windows": 4, "held_out": 0.2},
        "optim": {"optimizer": "muon", "lr": 0.004, "muon_lr": 0.01},
        "steps": 4,
        "batch_size": 2,
        "dtype": "fp32",
        "device": "cpu",
        "val_every": 4,
        "log_every": 4,
        "depth_every": 4,
        "save_every": 4,
    },
    many=2,
    seeds=1,
    floor=2,
    ladder=(qwen3(8, 1, 1, 16), qwen3(8, 2, 1, 16), qwen3(16, 2, 2, 32)),
    tokens_a_parameter=0.01,
    layers=(1, 2, 4),
    deep=qwen3(8, 4, 1, 16),
    gpt2=gpt2(16, 4, 2),
    small=0.0002,
    flops_per_s=1e9,
    most=2,
    timing_s=0.01,
)

NANO = Preset(
    about="2.9 M parameters, 10 M tokens a run: two cores, about 35 minutes a run on one of them",
    # recipes/lasting_rates.yaml is this recipe.
    train={
        "model": {"size": "nano"},
        "data": {"seq_len": 256, "tokenizer": "bpe:4096", "val_windows": 256},
        "optim": {"optimizer": "muon", "lr": 0.004, "muon_lr": 0.01},
        "steps": 5000,
        "batch_size": 8,
        "dtype": "bf16",
        "val_every": 250,
        "depth_every": 250,
        "save_every": 250,
    },
    many=2000,
    seeds=3,
    floor=8,
    ladder=(qwen3(32, 3, 1, 96), qwen3(48, 5, 2, 144), qwen3(64, 6, 2, 192), qwen3(96, 9, 3, 288)),
    tokens_a_parameter=20.0,
    layers=(3, 6, 12, 24, 48),
    deep=qwen3(64, 48, 2, 192),
    gpt2=gpt2(128, 12, 4),
    small=0.1,
    flops_per_s=8e10,
)

DEMO = dataclasses.replace(
    NANO,
    about="the same model for 1 M tokens: early learning alone, about 4 minutes a run on one core",
    train={**NANO.train, "steps": 500, "val_every": 100, "depth_every": 100, "save_every": 500},
    many=500,
    tokens_a_parameter=2.0,
)

MICRO = dataclasses.replace(
    NANO,
    about="nano's depth at half its width, 0.9 M parameters, 4 M tokens: two cores, 6 minutes a run on one of them",
    train={
        **NANO.train,
        "model": {"size": qwen3(64, 12, 2, 192)},
        "steps": 2000,
        "val_every": 200,
        "depth_every": 200,
        "save_every": 500,
    },
    ladder=(*NANO.ladder[:3], qwen3(80, 8, 2, 240)),
    deep=qwen3(32, 48, 1, 96),
    gpt2=gpt2(64, 12, 2),
    flops_per_s=5e10,
)

PICO = dataclasses.replace(
    NANO,
    about="nano's depth at a quarter of its width, 0.2 M parameters, 21 tokens each: two cores, 4 minutes a run on one",
    train={
        **MICRO.train,
        "model": {"size": qwen3(32, 12, 1, 96)},
        "data": {**NANO.train["data"], "seq_len": 128, "tokenizer": "bpe:1024"},
        "batch_size": 16,
    },
    ladder=(qwen3(16, 6, 1, 48), qwen3(24, 8, 1, 72), qwen3(32, 12, 1, 96), qwen3(40, 15, 1, 120)),
    layers=(1, 2, *NANO.layers),
    deep=qwen3(16, 48, 1, 48),
    gpt2=gpt2(32, 12, 1),
    small=0.05,
    flops_per_s=2.5e10,
)

HUNDRED = Preset(
    about="40 M parameters and its vocabulary, 1.3 B tokens a run: one GPU a run, eight at once",
    train={
        "model": {"size": "100m"},
        "data": {"source": "hub:HuggingFaceFW/fineweb-edu:sample-10BT", "seq_len": 1024, "tokenizer": "bpe:32768"},
        "optim": {"optimizer": "muon", "lr": 0.002, "muon_lr": 0.01},
        "steps": 20_000,
        "batch_size": 64,
        "dtype": "bf16",
        "device": "cuda",
        "compile": True,
        "val_every": 500,
        "depth_every": 1000,
        "save_every": 1000,
    },
    many=10_000,
    seeds=3,
    floor=8,
    ladder=(qwen3(256, 8, 4, 768), qwen3(384, 10, 6, 1152), qwen3(512, 12, 8, 1536), qwen3(640, 16, 10, 1920)),
    tokens_a_parameter=20.0,
    layers=(6, 12, 24, 48, 96),
    deep=qwen3(256, 48, 4, 768),
    gpt2="gpt2-124m",
    small=1.0,
    flops_per_s=1.5e14,
)


_OF_A_CPU = {"pico": PICO, "micro": MICRO, "demo": DEMO, "nano": NANO}
"""Presets that train in bf16 on a CPU, emulated if it lacks native bf16."""

# Without bf16, for a CPU that would emulate it: other recipes with noise of their own.
_IN_FP32 = {
    f"{name}-fp32": dataclasses.replace(
        preset, about=f"{preset.about}; in fp32", train={**preset.train, "dtype": "fp32"}
    )
    for name, preset in _OF_A_CPU.items()
}
PRESETS = {"seconds": SECONDS, **_OF_A_CPU, "100m": HUNDRED, **_IN_FP32}
"""Presets by name: a larger one is a line here."""


def shape(layers: int, parameters: float) -> dict[str, Any]:
    """Return a Qwen3 with `layers` layers that have about `parameters` parameters, and an MLP of three times its width.

    A layer has 3 d^2 in its attention with half as many key-value heads, and 9 d^2 in its MLP; d is a multiple of 8.
    """
    width = max(8, round((parameters / layers / 12) ** 0.5 / 8) * 8)
    even = (count for count in range(2, width // 32 + 1, 2) if width % (2 * count) == 0)
    return qwen3(width, layers, max(even, default=1), 3 * width)
