"""What the explorer's server does for a click on a token of a deep model, now and at an earlier commit, interleaved.

    python benchmarks/click.py 06aad10                 # of before numbers were drawn in the browser

The model is a Qwen2 of 28 layers of width 128 with random weights, converted to Full: 57 reads, 1,653 edges. Both pages
read the same text; rounds alternate, each a click on a token whose figures were not kept. Times are the processes' own,
on one thread, so that other work on the machine counts little. The present page also scores the edges of a prediction.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

LAYERS, WIDTH, VOCABULARY, TOKENS = 28, 128, 4096, 120


def save_model(folder: str) -> None:
    """Save the model and a tokenizer of ids written in digits; each commit writes a folder that it reads."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    import attnres

    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
    )
    model = attnres.convert(Qwen2ForCausalLM(config), "full")
    with torch.no_grad():
        for parameter in model.residual.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    backend = Tokenizer(WordLevel({str(number): number for number in range(VOCABULARY)}))
    backend.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)


def serve(folder: str) -> None:
    """Answer lines of stdin: "click T" with what it took and sent, "score T" with what measuring took."""
    import torch

    try:
        from attnres.app.opened import Opened
    except ImportError:  # of an earlier commit
        from attnres.app.explorer import Opened  # ty: ignore[import-not-found]
    from attnres.app.page import Page
    from attnres.app.state import View

    torch.set_num_threads(1)
    save_model(folder)
    page = Page([Opened(folder)])
    text = " ".join(str((37 * i) % VOCABULARY) for i in range(TOKENS))
    page.show(View(text, token=3))
    print("ready", flush=True)
    for line in sys.stdin:
        what, token = line.split()
        view = View(text, token=int(token))
        wall, began = time.perf_counter(), time.process_time()
        if what == "click":
            shown: Any = page.show(view)
            sent = json.dumps(shown if isinstance(shown, dict) else [str(one) for one in shown.panes])
            made: dict[str, Any] = {"bytes": len(sent)}
        else:
            scores = page.score(view, 0, lambda done, whole: None)
            made = {"edges": scores["edges"]}
            made["measured"] = sum(one is not None for row in scores["measured"] for one in row)
        print(json.dumps({"s": time.process_time() - began, "wall_s": time.perf_counter() - wall, **made}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="of the earlier page")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", default="benchmarks/results/click_cpu.json")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return

    import torch

    from attnres.files import write_json
    from attnres.training.environment import describe

    with tempfile.TemporaryDirectory() as root:
        old = Path(root, "old")
        subprocess.run(["git", "worktree", "add", "--detach", "-q", old, options.commit], check=True)
        try:
            servers = {}
            for name, tree in (("before", old), ("now", Path.cwd())):
                command = [sys.executable, __file__, options.commit, "--serve", str(Path(root, name))]
                environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
                servers[name] = subprocess.Popen(
                    command, cwd=tree, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            for server in servers.values():
                assert server.stdout is not None and server.stdout.readline() == "ready\n"

            def ask(name: str, line: str) -> dict[str, Any]:
                server = servers[name]
                assert server.stdin is not None and server.stdout is not None
                server.stdin.write(line + "\n")
                server.stdin.flush()
                return json.loads(server.stdout.readline())

            clicks = [{name: ask(name, f"click {10 + i}") for name in servers} for i in range(options.rounds)]
            scores = ask("now", f"score {TOKENS - 1}")
            for server in servers.values():
                assert server.stdin is not None
                server.stdin.close()
                server.wait()
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", old], check=True)
    result = {
        "command": shlex.join(["python", "benchmarks/click.py", *sys.argv[1:]]),
        "environment": describe(torch.device("cpu"), "fp32"),
        "model": f"Qwen2 of random weights converted to full: {LAYERS} layers of width {WIDTH}, {TOKENS} tokens",
        "click_s": {name: median(row[name]["s"] for row in clicks) for name in servers},
        "click_bytes": {name: median(row[name]["bytes"] for row in clicks) for name in servers},
        "ratio": median(row["now"]["s"] / row["before"]["s"] for row in clicks),
        "ratios": [row["now"]["s"] / row["before"]["s"] for row in clicks],
        "score": scores,
    }
    write_json(Path(options.out), result)
    print(json.dumps({key: result[key] for key in ("click_s", "click_bytes", "ratio", "score")}))


if __name__ == "__main__":
    main()
