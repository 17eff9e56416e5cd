"""Alternative residual rules, at the recipe's learning rates and each at its best ones."""

from lab.tuning import tuned_study

RIVALS = {
    "standard": "",
    "block": "1.746 where standard has 1.766 (436 M)",
    "full": "1.737 where standard has 1.766 (436 M)",
    "hyper_connections": "",
    "mhc_lite": "1.747 where standard has 1.766 (436 M)",
    "identity_hc": "",
    "frac_connections": "",
    "denseformer": "1.767 where standard has 1.766 (436 M)",
    "muddformer": "",
    "dca": "",
    "ancre": "",
    "delta_attnres": "perplexity 36.83 where standard has 38.71 (220 M, its own layout)",
    "lr_attnres:rank=8": "",
    "inkling2": "",
    "mrla_light": "",
    "laurel": "",
    "siamese_norm": "",
    "parallel_lanes": "",
    "ddl": "",
    "highway": "",
    "rezero:prenorm=false": "",
    "layerscale": "",
    "layernorm_scaling": "",
    "norm_preserving": "",
    "peri_ln": "",
    "hybrid_norm": "not as here, where attention keeps its norm in front",
    "keel": "",
    "deepnorm": "",
    "postnorm": "",
    "completep": "",
    "cumulative:num_blocks=4,recency_bias=0,query_std=0.02": "3.489 where standard has 3.523 (100 M, since withdrawn)",
    "boundary:num_blocks=4": "3.474 where standard has 3.478 (GPT-2, 124 M)",
}
"""Variant -> the published result relative to a standard model, if there is one."""


STUDY = tuned_study(
    "rivals",
    "Do depth reads beat the other ways to connect a network?",
    "Thirty-two mechanisms, the standard model too, at the recipe's rates and then each at the best of its own: the "
    "recipe's, half, twice, and its own parameters at another.",
    "arXiv 2603.15031, Tables 2 and 4; 'Most Transformer Modifications Still Do Not Transfer' (2605.20798): 2 of 20 "
    "modifications pass a noise floor at 1.2 B.",
    RIVALS,
    "Mechanisms at the recipe's rates",
    "Mechanisms at their own best rate",
)
