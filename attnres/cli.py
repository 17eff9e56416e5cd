"""The command `attnres`: finds the subcommand and turns errors into exit statuses.

A subcommand is a row of `COMMANDS`, and a file of `attnres/commands/` or a row of `CALLS` in its `short.py`. Nothing
heavy is imported before a subcommand has understood its flags, so that help and mistakes are quick. A user's mistake
prints one sentence on stderr and exits with status 2. An unexpected exception prints one sentence with the place where
it was raised and exits with status 1. --debug shows the traceback of either.
"""

import contextlib
import importlib
import io
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from attnres.errors import (
    DEBUG,
    ERROR_FILE,
    Interrupted,
    UserError,
    first_line,
    is_out_of_memory,
    is_panic,
    refusal,
    unknown,
    user_file_fault,
)
from attnres.text import listed, one_line

COMMANDS = {
    "train": "train one model",
    "compare": "train variants side by side under equal conditions, as make demo does",
    "report": "make the table and report.html from run folders",
    "prepare": "tokenise a corpus",
    "convert": "give a pretrained model depth reads, its logits unchanged",
    "export": "write a model as a graph for other runtimes, such as ONNX",
    "families": "list the families of decoders that convert",
    "eval": "perplexity and tasks, for one model or several side by side",
    "generate": "continue a prompt",
    "inspect": "what every read of a model consists of, and what ablating a source changes",
    "search": "the tokens at which a source contributes most to a read, with context",
    "figures": "the figures of models and runs, for a paper",
    "app": "look into one or two models in the browser",
    "plan": "memory, traffic, bubble and time of a model on layouts of GPUs",
    "mechanisms": "list the residual mechanisms: rule, start values, cost",
    "doctor": "faults of a model with depth reads that no error tells",
    "check": "check that a residual mechanism satisfies the interface",
    "env": "print versions, devices, and which backend depth reads use",
}
"""Name and purpose of each subcommand."""

_HELP = """\
usage: attnres [-h] [--version] COMMAND [OPTIONS]

Transformers whose sublayers read a learned softmax over earlier outputs.

commands:
{commands}

attnres COMMAND --help shows a command's options; with --debug, errors come with their traceback and libraries with
what they report.

examples:
  attnres compare
  attnres compare --variants standard block:num_blocks=6 full --seeds 0 1 2 --out runs/blocks
  attnres compare --variants standard block --lrs 5e-4 1e-3 2e-3 --out runs/rates
  attnres train --residual full --source my_text/ --steps 2000 --out runs/mine
  attnres report runs/blocks
  attnres eval runs/blocks/standard-seed0 runs/blocks/block-seed0 --data eval_files/ --tasks wikitext2 lambada
  attnres generate runs/mine --prompt "Once upon a time" --show-depth
  attnres figures runs/demo figures/
  attnres inspect runs/mine --text "Once upon a time" --knock-out embedding@output --attribute
  attnres search runs/mine embedding@mlp0 --corpus my_text/
  attnres app runs/demo/block-seed0 runs/demo/full-seed0 --open
  attnres plan 0.6b --gpus 16 --context 8192
  attnres check my_residual.py:Mine
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line (by default this process's); raises SystemExit when it fails."""
    words = without_debug(sys.argv[1:] if arguments is None else arguments)
    carry_out(lambda: _dispatch(words), words)


def without_debug(words: Sequence[str]) -> list[str]:
    """Return the words of a command line without --debug; if --debug is among them, switch it on for the process."""
    if "--debug" in words:
        os.environ[DEBUG] = "1"
    if DEBUG not in os.environ:
        for logger in ("torchao", "torch.utils._pytree"):
            logging.getLogger(logger).addFilter(_is_worth_a_line)
    return [word for word in words if word != "--debug"]


def carry_out(action: Callable[[], object], words: Sequence[str] = ()) -> None:
    """Call `action`; print one sentence for an exception and exit with its status, as `attnres` does.

    Args:
        words: the command line; the message of an unexpected exception names the files in it.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # characters that the terminal's encoding lacks are escaped
            stream.reconfigure(errors="backslashreplace")
    try:
        action()
    except UserError as error:
        _fail(f"error: {one_line(str(error))}", 2)
    except Interrupted as error:
        _fail(str(error), error.code)
    except BrokenPipeError:  # the process that read the pipe has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        _fail("error: stopped", 130)
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        if is_out_of_memory(error):
            _fail(
                f"error: out of memory ({one_line(first_line(error))}): training takes less with a higher "
                "--accumulation, with --gradient-checkpointing layer or with a smaller --batch-size",
                2,
            )
        if fault := user_file_fault(error):
            _fail(f"error: {one_line(str(fault))}", 2)
        if refused := refusal(error):
            _fail(f"error: {one_line(refused)}", 2)
        _fail(_unforeseen(error, words), 1)


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Return False for two messages that Transformers' import of torchao logs: that torchao has kernels for other
    machines, and that it registers enums in a way deprecated in torch."""
    message = record.getMessage()
    return not message.startswith("Failed to load ") and "register_constant() on Enum" not in message


def _dispatch(arguments: list[str]) -> None:
    name, *rest = arguments or ["help"]
    if name in ("-h", "--help", "help"):
        width = max(map(len, COMMANDS))
        rows = "\n".join(f"  {command:<{width}} {what}" for command, what in COMMANDS.items())
        print(_HELP.format(commands=rows), end="")
    elif name == "--version":
        from attnres import __version__

        print(f"attnres {__version__}")
    elif name in COMMANDS:
        from attnres.commands import short

        if name in short.CALLS:
            short.run(name, rest)
        else:
            importlib.import_module(f"attnres.commands.{name}").run(rest)
    elif name == "study":
        raise UserError("studies are in lab/ of the repository, not in the package: run python -m lab in a clone")
    elif name.startswith("-"):
        raise UserError(f"the command comes first, found '{name}': attnres COMMAND [OPTIONS], see attnres --help")
    else:
        raise unknown("command", name, COMMANDS)


def _unforeseen(error: BaseException, words: Sequence[str]) -> str:
    """Return the sentence for an unexpected exception: its type, where it was raised, and the files of the command
    line."""
    frames, package = traceback.extract_tb(error.__traceback__), Path(__file__).parent
    our_frames = [frame for frame in frames if Path(frame.filename).is_relative_to(package)]
    place = f"{Path(our_frames[-1].filename).name}:{our_frames[-1].lineno}" if our_frames else "a library"
    files = [word for word in words[1:] if not word.startswith("-") and os.path.exists(word)]
    about = f", with {listed(files)}" if files else ""
    return (
        f"error: unforeseen {type(error).__name__} at {place}{about} ({one_line(first_line(error))}): a file that is "
        "damaged, or a mistake of attnres; the same command with --debug shows where, and a report of it is welcome"
    )


def _fail(message: str, code: int) -> None:
    """Print the message on stderr and exit with `code`; with --debug, or for an unexpected exception of a comparison's
    run, also print the traceback. A run of a comparison writes the message to `ERROR_FILE` instead, for its parent
    (comparison/children.py)."""
    if DEBUG in os.environ or (code == 1 and ERROR_FILE in os.environ):
        traceback.print_exc()
    file = os.environ.get(ERROR_FILE)
    if file:
        with contextlib.suppress(OSError):
            Path(file).write_text(message.removeprefix("error: "), encoding="utf-8")
            sys.exit(code)
    print(f"attnres: {message}", file=sys.stderr)
    sys.exit(code)
