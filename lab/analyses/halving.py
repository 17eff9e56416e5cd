"""Which candidates go on: the better ones of each group, and one more where the best is the first or last tried."""

import math
from collections.abc import Mapping, Sequence


def survivors(losses: Mapping[str, float], keep: int) -> list[str]:
    """The `keep` candidates with the lowest losses, best first; one that diverged (NaN) never survives.

    >>> survivors({"a": 3.0, "b": 1.0, "c": 2.0}, 2)
    ['b', 'c']
    """
    finite = {name: loss for name, loss in losses.items() if math.isfinite(loss)}
    return sorted(finite, key=finite.__getitem__)[:keep]


def beyond(losses: Mapping[float, float], factor: float, most: float) -> float | None:
    """The next rate to try where the best of those tried is the highest or the lowest: `factor` times that or a
    `factor`-th of it, from 1 / `most` up to `most`; else None.

    >>> beyond({1.0: 3.0, 2.0: 2.5}, 2.0, 16.0), beyond({1.0: 3.0, 2.0: 3.5}, 2.0, 16.0)
    (4.0, 0.5)
    >>> beyond({0.5: 3.2, 1.0: 3.0, 2.0: 3.5}, 2.0, 16.0)
    """
    finite = {rate: loss for rate, loss in losses.items() if math.isfinite(loss)}
    if not finite:
        return None
    best = min(finite, key=finite.__getitem__)
    if best not in (max(losses), min(losses)):
        return None
    further = best * factor if best == max(losses) else best / factor
    return further if 1 / most <= further <= most else None


def at_best(losses: Mapping[str, float], of: Mapping[str, str]) -> dict[str, str]:
    """For each mechanism its candidate with the lowest loss: `of` names the mechanism of each candidate."""
    names: Sequence[str] = list(dict.fromkeys(of.values()))
    best = {name: survivors({c: loss for c, loss in losses.items() if of[c] == name}, 1) for name in names}
    return {name: kept[0] for name, kept in best.items() if kept}
