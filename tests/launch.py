"""The launcher of tests that need several processes."""

import os
import sys


def torchrun(processes: int, *command: str) -> list[str]:
    """A command line that runs this one, of Python, in so many processes and leaves no folder of logs behind."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [*run, f"--log-dir={os.devnull}", *command]
