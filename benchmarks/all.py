"""The benchmarks of kernels, steps, decoding and loss in one command.

It goes on after one that fails, and says at the end which did.

    python benchmarks/all.py --device cuda                   # JSON, plots and text into benchmarks/results/
    python benchmarks/all.py --device cuda --only kernels stack --out results --timeout 540
    python benchmarks/all.py --device cpu --quick            # small, a few minutes: whether everything works

Peers are measured where they are installed (peers.py prints the pip line).
"""

import argparse
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import harness
from harness import progress, table

from attnres.files import write_json, write_text
from attnres.reading import read_json

HERE = Path(__file__).resolve().parent
LARGE = ["--sizes", "100m", "0.6b", "deep-narrow"]


def jobs(device: str, quick: bool) -> dict[str, list[str]]:
    """Name -> script and arguments; the name is that of its results."""
    on = ["--device", device]
    few = ["--seconds", "0.5"] if quick else []
    step = ["step.py", *on, *(["--seconds", "2", "--batch", "2", "--length", "64"] if quick else ["--seconds", "60"])]
    commands = {
        "peers": ["peers.py", *on],
        "kernels": ["kernels.py", *on, *few],
        "stack": ["stack.py", *on, *few],
        "decode": ["decode.py", *on, *few],
        "generate": ["generate.py", *on, *(["--rounds", "2", "--tokens", "8"] if quick else [])],
        "step": [*step, *(LARGE if device == "cuda" and not quick else [])],
        "loss": ["loss.py", *on, *(["--seconds", "1", "--vocabulary", "4096", "--tokens", "256"] if quick else [])],
        "muon": ["muon.py", *on, *few],
        "trainer": ["trainer.py", *on, *(["--seconds", "1", "--shapes", "2x32"] if quick else ["--seconds", "60"])],
    }
    if device == "cuda":
        commands["decode_graphs"] = ["decode.py", *on, *few, "--graphs"]
        commands["held"] = ["held.py", *(["--shapes", "1024x512x4x3:fp32"] if quick else [])]
        commands["busy"] = ["busy.py", "--compile", *(["--size", "nano", "--seconds", "2"] if quick else [])]
        commands["step_compiled"] = [*commands["step"], "--compile"]
    else:
        commands["frames"] = ["frames.py"]
        commands["overlap"] = ["overlap.py", *(["--width", "64", "--tokens", "16"] if quick else [])]
    return commands | {"traffic": ["traffic.py"]}


def run_job(name: str, arguments: list[str], device: str, out: Path, timeout: float | None) -> dict[str, Any]:
    """Run one script; its text goes to the terminal and beside its results."""
    if name not in ("peers", "traffic"):
        arguments = [*arguments, "--out", str(out / f"{name}_{device}.json")]
    measured = out / f"kernels_{device}.json"
    if name == "traffic" and measured.exists():
        arguments = [*arguments, "--bandwidth", str(read_json(measured)["copy_bytes_per_s"])]
    began, lines = time.monotonic(), []
    command = [sys.executable, str(HERE / arguments[0]), *arguments[1:]]
    script = " ".join(["python", f"benchmarks/{arguments[0]}", *arguments[1:]])
    print(f"\n== {script}\n", flush=True)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        timer = threading.Timer(threading.TIMEOUT_MAX if timeout is None else timeout, process.kill)
        timer.daemon = True
        timer.start()
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
        timer.cancel()
    if timeout is not None and time.monotonic() - began > timeout:
        lines.append(f"stopped after {timeout:.0f} s\n")
    write_text(out / f"{name}_{device}.txt", "".join(lines))
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return {"command": script, "status": process.returncode, "seconds": time.monotonic() - began, "last_line": last}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", required=True, choices=["cpu", "cuda"])
    parser.add_argument("--only", nargs="+", default=None, help="names of benchmarks, e.g. kernels step_compiled")
    parser.add_argument("--quick", action="store_true", help="small and short")
    parser.add_argument("--timeout", type=float, default=None, help="seconds, for each benchmark")
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    options = parser.parse_args()
    todo = jobs(options.device, options.quick)
    for name in options.only or []:
        if name not in todo:
            parser.error(f"there is no benchmark '{name}' on {options.device}: choose from {', '.join(todo)}")
    todo = {name: job for name, job in todo.items() if options.only is None or name in options.only}
    bar = progress("all", len(todo))
    done: dict[str, dict[str, Any]] = {}
    for name, job in todo.items():
        done[name] = run_job(name, job, options.device, options.out, options.timeout)
        write_json(options.out / f"all_{options.device}.json", done)
        bar.advance(1, name)
    rows = [["benchmark", "seconds", ""]]
    for name, result in done.items():
        rows.append([name, f"{result['seconds']:.0f}", "ok" if not result["status"] else result["last_line"]])
    print(f"\n{table(rows)}\n\nresults in {options.out}")
    return 1 if any(result["status"] for result in done.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
