"""A launch of several processes for all tests that need them."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launch import PATIENCE_S, torchrun

SCRIPT = Path(__file__).with_name("two_ranks.py")


def launch(folder: Path, jobs: dict[str, Any], processes: int = 2) -> Any:
    """What `two_ranks.py` writes of these jobs."""
    folder.mkdir(exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps({"cases": [], "runs": [], **jobs}))
    command = torchrun(processes, str(SCRIPT), str(folder))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as launched:
        try:
            said = launched.communicate(timeout=PATIENCE_S)[0]
        except subprocess.TimeoutExpired:
            launched.terminate()  # torchrun ends its workers; a kill would leave them behind
            said = f"timed out: {launched.communicate()[0]}"
    assert launched.returncode == 0, said
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="session")
def launched() -> Callable[..., Any]:
    return launch
