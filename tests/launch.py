"""What tests of several processes share."""

import os
import sys

PATIENCE_S = 1800.0
"""Seconds after which a process is taken to hang: many times what it needs, for a machine may be busy."""


def torchrun(processes: int, *command: str) -> list[str]:
    """A command line that runs this one, of Python, in so many processes and leaves no folder of logs behind."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [*run, f"--log-dir={os.devnull}", *command]
