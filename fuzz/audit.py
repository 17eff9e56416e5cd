"""Known vulnerabilities of the locked versions, by pip-audit: `python fuzz/audit.py constraints.txt`.

It exits with status 1 where there are some, and with 2 where some packages could not be looked up: of those nothing
is known.
"""

import json
import subprocess
import sys
from typing import Any

AUDIT = ("-m", "pip_audit", "--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json")


def judged(packages: list[dict[str, Any]]) -> tuple[str, int]:
    """What is said of pip-audit's list of packages, and the exit status."""
    unknown = [package["name"] for package in packages if "skip_reason" in package]
    lines = [
        f"{package['name']} {package['version']}: {one['id']}, mended in {', '.join(one['fix_versions']) or 'none'}"
        for package in packages
        for one in package.get("vulns", [])
    ]
    if lines:
        return "\n".join(["Known vulnerabilities:", *lines]), 1
    if unknown:
        return (
            f"{len(unknown)} of {len(packages)} packages could not be looked up ({', '.join(unknown[:3])}, ...), so "
            "nothing is known of them: make audit needs a network that reaches pypi.org"
        ), 2
    return f"No known vulnerabilities in {len(packages)} packages.", 0


def main() -> None:
    process = subprocess.run(
        [sys.executable, *AUDIT, "--requirement", sys.argv[1]], capture_output=True, text=True, check=False
    )
    try:
        text, status = judged(json.loads(process.stdout)["dependencies"])
    except ValueError:
        last = (process.stderr.strip().splitlines() or ["it said nothing"])[-1]
        text, status = f"pip-audit ended with status {process.returncode} ({last[:100]}): make audit needs a network", 2
    print(text)
    sys.exit(status)


if __name__ == "__main__":
    main()
