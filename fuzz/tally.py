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

    def failures(self, *areas: str) -> list[dict[str, Any]]:
        """The failures of some areas, of all where none is named."""
        return [failure for failure in self.record["failures"] if not areas or failure["area"] in areas]

    def save(self) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.record, indent=1) + "\n", encoding="utf-8")


FAILURES = ("traceback", "unforeseen", "slow", "changed", "stray", "orphan", "different", "status 5xx")
"""Verdicts that are none of: done, refused in a sentence, the same bytes."""
