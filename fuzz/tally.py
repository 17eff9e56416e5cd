"""What was tried and how it ended, kept in a JSON file so that a campaign goes on where it stopped."""

import json
from pathlib import Path
from typing import Any

KEPT = 200
"""Failures that are kept with what made them."""


class Tally:
    """Counts of every area, and the failures.

    Attributes:
        record: {"areas": {name: {"tried": n, VERDICT: n, ...}}, "failures": [...], "seconds": s, ...}, as in the file.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.record: dict[str, Any] = {"areas": {}, "failures": [], "seconds": 0.0}
        if path is not None and path.exists():
            self.record = json.loads(path.read_text(encoding="utf-8"))

    def tried(self, area: str) -> int:
        """How many cases of an area there were so far: the number of the next one, which seeds it."""
        return self.record["areas"].get(area, {}).get("tried", 0)

    def count(self, area: str, verdict: str, what: str = "", **more: Any) -> None:
        """Add a case; `what` made it, and it is kept where the verdict is a failure."""
        counts = self.record["areas"].setdefault(area, {"tried": 0})
        counts["tried"] += 1
        counts[verdict] = counts.get(verdict, 0) + 1
        if counts["tried"] % 20 == 0:
            self.save()
        if verdict in FAILURES and len(self.record["failures"]) < KEPT:
            self.record["failures"].append(
                {"area": area, "case": counts["tried"] - 1, "verdict": verdict, "what": what} | more
            )

    def again(self, failure: dict[str, Any], verdict: str, said: str) -> None:
        """Note how a case that failed ended when it was tried again."""
        counts = self.record["areas"][failure["area"]]
        for name, change in ((failure["verdict"], -1), (verdict, 1)):
            counts[name] = counts.get(name, 0) + change
            if not counts[name]:
                del counts[name]
        if verdict in FAILURES:
            failure |= {"verdict": verdict, "said": said}
        else:
            self.record["failures"].remove(failure)
            mended = {name: value for name, value in failure.items() if name != "said"}
            self.record.setdefault("mended", []).append(mended)

    def count_kind(self, name: str) -> None:
        """Count a case of this kind."""
        kinds = self.record.setdefault("kinds", {})
        kinds[name] = kinds.get(name, 0) + 1

    def failures(self, *areas: str) -> list[dict[str, Any]]:
        """The failures of some areas, of all where none is named."""
        return [failure for failure in self.record["failures"] if not areas or failure["area"] in areas]

    def table(self) -> str:
        """The counts as a table of Markdown, an area a row."""
        rows = ["| area | tried | how it ended | failures |", "|---|---:|---|---:|"]
        for area, counts in self.record["areas"].items():
            ways = ", ".join(f"{count:,} {verdict}" for verdict, count in sorted(counts.items()) if verdict != "tried")
            failed = sum(counts.get(verdict, 0) for verdict in FAILURES)
            rows.append(f"| {area} | {counts['tried']:,} | {ways} | {failed:,} |")
        return "\n".join(rows)

    def write_into(self, page: Path) -> None:
        """Put the table under the last heading of a page, in place of what is there."""
        begin, heading, _ = page.read_text(encoding="utf-8").rpartition("\n## Counts\n")
        assert heading, f"{page} has no heading 'Counts'"
        seconds = f"{self.record['seconds'] / 60:,.0f} minutes"
        lead = f"Of `fuzz/results/campaign.json`, {seconds} of `make fuzz`; a failure stands there with what made it."
        page.write_text(f"{begin}{heading}\n{lead}\n\n{self.table()}\n", encoding="utf-8")

    def save(self) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.record, indent=1) + "\n", encoding="utf-8")


FAILURES = ("traceback", "unforeseen", "slow", "changed", "stray", "orphan", "different", "status 5xx")
"""Verdicts that are none of: done, refused in a sentence, the same bytes."""
