"""The explorer: one or two models in the browser. Only `server` needs Gradio."""

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from attnres.app.address import check_port
from attnres.errors import UserError

DEMO = Path("runs/demo")


def explore(
    models: Sequence[str | Path] = (),
    *,
    host: str = "127.0.0.1",
    port: int = 7860,
    browser: bool = False,
    trust_remote_code: bool = False,
) -> None:
    """Serve the explorer of one or two models until Ctrl-C; without any, of the demo's.

    Raises:
        UserError: no Gradio, more than two models, one that cannot be shown, or a port in use.
    """
    if len(models) > 2:
        raise UserError(f"{len(models)} models were given: the explorer shows one, or two side by side")
    check_port(host, port)
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when Gradio is imported
    if importlib.util.find_spec("gradio") is None:
        raise UserError("the explorer needs Gradio: pip install 'attnres[app]'")
    from attnres.app.explorer import choose_threads, find_demo, open_models
    from attnres.app.page import Page

    page = Page(open_models(models or find_demo(DEMO), trust_remote_code=trust_remote_code))
    choose_threads(page.models)
    from attnres.app.server import serve

    serve(page, host=host, port=port, browser=browser)
