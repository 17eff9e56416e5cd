"""The explorer: models in the browser, one or two side by side. Only `server` needs Starlette and uvicorn."""

import importlib.util
import socket
from collections.abc import Sequence
from pathlib import Path

from attnres.errors import UserError, first_line, install

DEMO = Path("runs/demo")


def explore(
    models: Sequence[str | Path] = (),
    *,
    corpus: str | None = None,
    column: str = "text",
    host: str = "127.0.0.1",
    port: int = 7860,
    names: Sequence[str] = (),
    browser: bool = False,
    trust_remote_code: bool = False,
) -> None:
    """Serve the explorer of one or two models until Ctrl-C; without any, of the demo's.

    Args:
        corpus: what can be searched: stdlib, a file or folder, hub:NAME; its `column` where it has several.

    Raises:
        UserError: no Starlette, more than two models, one that cannot be shown, no such corpus, or a port in use.
    """
    if len(models) > 2:
        raise UserError(f"{len(models)} models were given: the explorer shows one, or two side by side")
    address = check_port(host, port)
    if importlib.util.find_spec("starlette") is None or importlib.util.find_spec("uvicorn") is None:
        raise UserError(f"the explorer needs Starlette and uvicorn: {install('app')}")
    from attnres.app.explorer import choose_threads, find_demo, open_models
    from attnres.app.page import Page
    from attnres.inspect.look import corpus_text

    searched = None if corpus is None else corpus_text(corpus, column)
    page = Page(open_models(models or find_demo(DEMO), trust_remote_code=trust_remote_code), searched)
    choose_threads([model for model in page.models if model.is_loaded])
    from attnres.app.server import serve

    serve(page, address, host=host, port=port, names=names, browser=browser)


def check_port(host: str, port: int) -> str:
    """Return the numeric address that a server on `host` is bound to. Raises UserError where nothing can be served."""
    if not 1 <= port <= 65535:
        raise UserError(f"port is {port}: expected 1 to 65535")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return probe.getsockname()[0]
    except (OSError, UnicodeError) as error:  # a name that no host can have
        why = (getattr(error, "strerror", None) or first_line(error)).lower()
        raise UserError(
            f"cannot serve on {host}:{port} ({why}): choose another --port, or a --host of this machine"
        ) from error
