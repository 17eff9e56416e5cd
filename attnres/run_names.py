"""How runs are called: LABEL-seedK."""

import re

_NAME = re.compile(r"(?P<label>.+)-seed(?P<seed>\d+)")


def run_name(label: str, seed: int) -> str:
    """Return the name of the run of a variant and seed, which is its folder's.

    >>> run_name("block", 1)
    'block-seed1'
    """
    return f"{label}-seed{seed}"


def label_and_seed(name: str) -> tuple[str, int] | None:
    """Take a run's name apart; None where it is none.

    >>> label_and_seed("block-num_blocks4-seed10"), label_and_seed("figures")
    (('block-num_blocks4', 10), None)
    """
    match = _NAME.fullmatch(name)
    return (match["label"], int(match["seed"])) if match else None
