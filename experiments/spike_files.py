"""Findings as files: all of them in JSON, weights and knock-outs as CSV, the main figures as text."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attnres.files import write_json, write_text
from attnres.text import csv_text

MEAN = ("mean", "se_documents", "se_seeds")


def save(results: dict[str, Any], folder: str | Path) -> list[Path]:
    """Write FOLDER/findings.json, weights.csv (variant, read, kind), knock_outs.csv and findings.txt."""
    folder = Path(folder)
    paths = [folder / name for name in ("findings.json", "weights.csv", "knock_outs.csv", "findings.txt")]
    write_json(paths[0], results)
    write_text(paths[1], csv_text(["variant", "read", "boundary", "kind", *MEAN], _weight_rows(results)))
    write_text(paths[2], csv_text(["variant", "reads", "at", "after", *MEAN], _change_rows(results)))
    write_text(paths[3], table(results))
    return paths


def _weight_rows(results: dict[str, Any]) -> Iterator[Sequence[Any]]:
    for variant in results["variants"]:
        parts = {**variant["weights"], **{f"spike over {name}": part for name, part in variant["spikes"].items()}}
        for kind, part in parts.items():
            for i, read in enumerate(variant["reads"]):
                if part["mean"][i] is not None:
                    values = (part[key][i] for key in MEAN)
                    yield [variant["label"], read, int(i in variant["boundaries"]), kind, *values]


def _change_rows(results: dict[str, Any]) -> Iterator[Sequence[Any]]:
    for variant in results["variants"]:
        for row in variant["knock_outs"]:
            for after, part in row.items():
                if isinstance(part, dict):
                    yield [variant["label"], row["reads"], row["at"], after, *part.values()]


def table(results: dict[str, Any]) -> str:
    """The findings in a few lines; `mean +- error over documents (over seeds)`."""
    start = results["start"]
    lines = [
        f"{results['language']}: {results['documents']} held-out documents, {results['tokens'][start]:,} of "
        f"{sum(results['tokens'].values()):,} tokens are a {start}"
    ]
    for variant in results["variants"]:
        lines += ["", f"{variant['label']}, {len(variant['seeds'])} seeds"]
        for name, part in variant["spikes"].items():
            more, less, reads = beyond(part)
            lines.append(f"  against {name}: {more} of {reads} reads weigh the embedding more at starts, {less} less")
        for name, top in variant["largest"].items():
            lines.append(
                f"  largest spike, {name} (of {top['of']}): '{top['read']}' {_say(top['other tokens'])} over other "
                f"tokens, {_say(top['alike'])} over tokens alike, {_say(top['same token'])} over the same token "
                f"elsewhere; by seed: {', '.join(top['largest_of_each_seed'])}"
            )
        for row in variant["knock_outs"]:
            lines.append(
                f"  embedding removed from {row['reads']} at {row['at']}: loss after a {start} {_say(row['starts'])}, "
                f"after other tokens {_say(row['other tokens'])}, difference {_say(row['starts - other tokens'])}"
            )
    if results["skipped"]:
        lines += ["", f"no weights of the embedding: {', '.join(results['skipped'])}"]
    return "\n".join(lines) + "\n"


def beyond(spike: dict[str, Any], errors: float = 2.0) -> tuple[int, int, int]:
    """How many reads have a spike above, and below, zero by more than so many standard errors (over documents and over
    seeds, added in squares), and of how many there is one to tell."""
    rows = zip(*(spike[key] for key in MEAN), strict=True)
    with_errors = [(mean, math.hypot(documents or 0.0, seeds or 0.0)) for mean, documents, seeds in rows]
    told = [mean / error for mean, error in with_errors if error]
    return sum(ratio > errors for ratio in told), sum(ratio < -errors for ratio in told), len(told)


def _say(part: dict[str, Any]) -> str:
    mean, documents, seeds = ("?" if value is None else f"{value:.4f}" for value in part.values())
    return f"{mean} +- {documents} ({seeds})"
