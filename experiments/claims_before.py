"""The page docs/project/claims_before.md: what each claim's verdict was, beside today's intervals.

python experiments/claims_before.py

The verdicts are in docs/data/claims_before.csv, from docs/results.md before commit e6259119; the intervals are read
from docs/results/claims.md, which is written first.
"""

from collections import Counter

from recipe_runs import rows
from results_page import ROOT

from attnres.files import write_text

PAGE = ROOT / "docs" / "project" / "claims_before.md"
CLAIMS = ROOT / "docs" / "results" / "claims.md"
SHOWN = ("claim", "ours (95 %)", "excludes 0")


def today() -> list[tuple[str, ...]]:
    """Return the number of each answer's claim (empty for a claim's further answers) and its cells `SHOWN`."""
    lines = [line for line in CLAIMS.read_text("utf-8").splitlines() if line.startswith("|")]
    head, _, *answers = ([cell.strip() for cell in line[1:-1].split("|")] for line in lines)
    return [(cells[0], *(cells[head.index(name)] for name in SHOWN)) for cells in answers]


def page() -> str:
    """Return the page."""
    before = {row["claim"]: row["word"] for row in rows("claims_before.csv")}
    counts = Counter(word.split()[0] for word in before.values())
    lines = [
        "# Each claim before and after",
        "",
        "Written by `python experiments/claims_before.py`. Until commit e6259119 each claim had a verdict, by a bar of "
        "three standard errors or more:",
        f"{', '.join(f'{word} {count}' for word, count in counts.most_common())}. Now it has an interval, by one rule "
        "for all. The words are quoted from that page; the rest is read from",
        "[the table of claims](../results/claims.md), which has sizes, sources and commands.",
        "",
        "| # | claim | word before | today (95 %) | excludes 0 |",
        "|---:|---|---|---|---|",
    ]
    for number, claim, ours, excludes in today():
        ours = ours.replace("](", "](../results/")
        lines.append(f"| {number} | {claim} | {before.get(number, '')} | {ours} | {excludes} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write_text(PAGE, page())
