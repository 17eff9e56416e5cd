"""How often the rule of comparisons is wrong, and what it sees: simulated studies in the design of the micro recipe.

    python experiments/power.py

Each study has the recipe's mechanisms and seeds, normal noise with each mechanism's own standard deviation as it was
measured there, and the luck that seeds share; nothing else differs. Written to docs/data/power_micro.json.
"""

import numpy as np
from recipe_runs import DATA, micro

from attnres.files import write_json
from attnres.stats import ALPHA, QUESTIONS, Recipe, judged, plain

STUDIES = 200
TRUE = -0.03


def simulated(runs: list, sds: dict[str, float], seed_sd: float, gain: float, rng: np.random.Generator) -> Recipe:
    """A study with the runs' design, in which Block alone differs, by `gain`."""
    luck = {seed: rng.normal(scale=seed_sd) for seed in {seed for _, seed, _ in runs}}
    return Recipe(
        (name, seed, gain * (name == "block") + luck[seed] + rng.normal(scale=sds[name])) for name, seed, _ in runs
    )


def measured(studies: int) -> dict:
    """Shares of simulated studies whose intervals exclude 0: of no difference by question, and of a true one."""
    runs, rng = micro(), np.random.default_rng(0)
    recipe = Recipe(runs)
    results = {}
    for case, sds in (
        ("own standard deviations", {name: recipe.sd(name) for name in recipe.names}),
        ("equal standard deviations", dict.fromkeys(recipe.names, recipe.sigma)),
    ):
        wrong, family, seen = dict.fromkeys(QUESTIONS, 0), 0, 0
        others = [name for name in recipe.names if name != "standard" and (name, "standard") not in QUESTIONS]
        for _ in range(studies):
            null = simulated(runs, sds, recipe.seed_sd, 0.0, rng)
            for pair in QUESTIONS:
                wrong[pair] += null.effect(*pair).excludes()
            rest = judged([null.effect(name, "standard") for name in others], [False] * len(others))
            family += any(effect.excludes() for effect in rest)
            seen += simulated(runs, sds, recipe.seed_sd, TRUE, rng).effect("block", "standard").excludes()
        results[case] = {
            "false positives": {" - ".join(pair): count / studies for pair, count in wrong.items()},
            "any false positive of the others, by Holm": family / studies,
            f"power at {TRUE} (block - standard)": seen / studies,
        }
    return {
        "studies": studies,
        "level": ALPHA,
        "runs": len(runs),
        "sigma": recipe.sigma,
        "degrees": recipe.degrees,
        "p_of_equal_variances": recipe.p_equal,
        "seed_sd": recipe.seed_sd,
        "results": results,
    }


if __name__ == "__main__":
    write_json(DATA / "power_micro.json", plain(measured(STUDIES)))
