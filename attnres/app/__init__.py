"""The explorer: models in the browser, one or two side by side. Only `server` needs Starlette and uvicorn.

`explore` opens it on a model in memory, `serve` on folders, as `attnres app` does.
"""

import importlib.util
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnres.errors import UserError, first_line, install

if TYPE_CHECKING:
    from attnres.app.server import Explorer

DEMO = Path("runs/demo")


def explore(
    model: Any, tokenizer: Any = None, *, text: Any = None, context: int | None = None, port: int = 0
) -> "Explorer":
    """Open the explorer of a model in the background, on 127.0.0.1 alone; a notebook shows it in its cell.

    >>> page = attnres.explore(model, tokenizer, text="def f(x):")  # doctest: +SKIP
    >>> page.url, page.close()                                      # doctest: +SKIP

    Args:
        model: a model of Transformers, a module of your own with a residual, a method of one, or a `TextModel`; a
            folder, a run or a hub name; or two of these, side by side.
        tokenizer: of Transformers or `tokenizers`, for models in memory; None is the model's own. Where there is none,
            a text is ids: "12 7 5".
        text: that the page opens with, in letters or as ids.
        context: tokens that a module takes, where it does not say.
        port: 0 is any that is free.

    Returns:
        A handle with `url` and `close`, which is a context manager too.

    Raises:
        UserError: no Starlette, a model that cannot be shown, more than two, or a port in use.
    """
    _need_server()
    from attnres.app.opened import Given, Opened, open_models
    from attnres.app.page import Page
    from attnres.app.server import Explorer

    models = list(model) if isinstance(model, list | tuple) else [model]
    _check_count(models)
    opened: list[Opened] = []
    for number, one in enumerate(models, 1):
        if isinstance(one, str | Path):
            opened += open_models([one])
        else:
            name = type(getattr(one, "__self__", getattr(one, "module", one))).__name__
            opened.append(Given(one, tokenizer, name=f"{name} {number}" if len(models) > 1 else name, context=context))
    for one in opened:
        one.sources  # noqa: B018  what cannot be shown is said at once
    return Explorer(Page(opened, text=opened[-1].text_of(text)), listen("127.0.0.1", port))


def serve(
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
    """Serve the explorer of one or two models until Ctrl-C; without any, of the demo's or the package's own.

    Args:
        corpus: what can be searched: stdlib, a file or folder, hub:NAME; its `column` where it has several.

    Raises:
        UserError: no Starlette, more than two models, one that cannot be shown, no such corpus, or a port in use.
    """
    _check_count(models or [DEMO])
    with listen(host, port) as listener:
        _need_server()
        from attnres.app.opened import choose_threads, find_demo, open_models
        from attnres.app.page import Page
        from attnres.inspect.texts import corpus_text

        searched = None if corpus is None else corpus_text(corpus, column)
        page = Page(open_models(models or find_demo(DEMO), trust_remote_code=trust_remote_code), searched)
        choose_threads([model for model in page.models if model.is_loaded])
        from attnres.app.server import run

        run(page, listener, host=host, names=names, browser=browser)


def _check_count(models: Sequence[Any]) -> None:
    if not 1 <= len(models) <= 2:
        raise UserError(f"{len(models)} models were given: the explorer shows one, or two side by side")


def _need_server() -> None:
    if importlib.util.find_spec("starlette") is None or importlib.util.find_spec("uvicorn") is None:
        raise UserError(f"the explorer needs Starlette and uvicorn: {install('app')}")


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 is any that is free. Raises UserError where nothing can be served."""
    if not 0 <= port <= 65535:
        raise UserError(f"port is {port}: expected 0 to 65535")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except (OSError, UnicodeError) as error:  # a name that no host can have
        why = (getattr(error, "strerror", None) or first_line(error)).lower()
        raise UserError(
            f"cannot serve on {host}:{port} ({why}): choose another --port, or a --host of this machine"
        ) from error
