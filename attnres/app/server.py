"""The page in Gradio: its components, which event calls what, and the server on its port."""

import json
import threading
from typing import Any
from urllib.parse import parse_qsl

import gradio as gr
from starlette.middleware import Middleware

from attnres.app import view as html
from attnres.app.address import check_port
from attnres.app.assets import CSS, DOWNLOAD, HEAD, ON_LOAD, ON_PANE, SET_LINK
from attnres.app.examples import EXAMPLES
from attnres.app.guard import Guard, is_loopback
from attnres.app.page import Page, Shown
from attnres.app.state import HEAVIEST, MAX_CHARACTERS, View
from attnres.errors import UserError
from attnres.text import listed

QUEUE = 32
"""Events that wait; more are turned away."""
SESSIONS = 64
"""Pages whose state is kept."""

_TITLE = "attnres: where every token reads from"
_INTRO = (
    "<h1>Where every token reads from</h1><p>Every sublayer of these models reads a weighted sum of what earlier ones "
    "wrote. Click a <b>token</b> to see its reads through depth, and a <b>cell</b> or bar to knock that edge out and "
    "see the prediction without it. The address of this page is a link to what it shows.</p>"
)


def build(page: Page) -> gr.Blocks:
    """The components of the page and their events."""
    options: dict[str, Any] = {"api_visibility": "private", "queue": True, "show_progress": "minimal"}
    with gr.Blocks(title=_TITLE, analytics_enabled=False, fill_width=True) as blocks:
        state = gr.State(View())
        query = gr.Textbox(visible=False)
        payload = gr.Textbox(visible=False)
        gr.HTML(_INTRO, apply_default_css=False, elem_id="intro", js_on_load=None)
        with gr.Row():
            text = gr.Textbox(
                label="Text",
                lines=6,
                max_lines=9,
                max_length=5 * MAX_CHARACTERS,
                elem_id="text",
                scale=3,
                min_width=300,
            )
            with gr.Column(scale=2, min_width=300):
                with gr.Row():
                    buttons = {
                        name: gr.Button(f"{name} example", size="sm", elem_id=f"example-{name}", min_width=110)
                        for name in EXAMPLES
                    }
                    reset = gr.Button("bring edges back", size="sm", elem_id="reset", min_width=130)
                    copy = gr.Button("copy link", size="sm", elem_id="copy", min_width=90)
                    save = gr.Button("save JSON", size="sm", elem_id="json", min_width=90)
                with gr.Row():
                    models = gr.Dropdown(
                        page.choices, label="Model", elem_id="models", visible=len(page.models) > 1, min_width=220
                    )
                    read = gr.Dropdown([], label="Read", elem_id="read", min_width=140)
                    source = gr.Dropdown([], label="Colour tokens by", elem_id="source", min_width=140)
        message = gr.HTML("", apply_default_css=False, elem_id="said", js_on_load=None)
        options["show_progress_on"] = message
        with gr.Row(elem_id="panes"):
            panes = [
                gr.HTML(wait, apply_default_css=False, js_on_load=ON_PANE, elem_id=f"pane-{i}", min_width=320)
                for i, wait in enumerate([html.message("reading the text ...", "note"), ""])
            ]
        outputs = [state, message, *panes, models, read, source, query]

        def shown(view: View, words: str = "") -> list[Any]:
            return _updates(page.show(view, words))

        def changed(view: View, make: Any, *arguments: Any) -> list[Any]:
            try:
                return shown(make(view, *arguments))
            except UserError as error:
                return shown(view, str(error))

        def load(search: str) -> list[Any]:
            fields = dict(parse_qsl(str(search)[1:20_000])) if search else {}
            fields = {name: value for name, value in fields.items() if len(name) == 1}
            view, words = page.begin(fields)
            return [*shown(view, words), view.text]

        def on_text(words: str | None, view: View) -> Any:
            words = words or ""
            # An example or a link changed it: they have shown it already.
            return gr.skip() if words == view.text else changed(view, page.type, words)

        def on_models(choice: str, view: View) -> list[Any]:
            return changed(view, page.choose, choice)

        def on_colour(index: int | None, name: str | None, view: View) -> list[Any]:
            return changed(view, page.colour, None if index is None or index < 0 else index, name or HEAVIEST)

        def on_click(view: View, event: gr.EventData) -> list[Any]:
            return changed(view, page.click, event._data)

        def on_reset(view: View) -> list[Any]:
            return changed(view, page.reset)

        def on_json(view: View) -> tuple[str, Any]:
            try:
                return json.dumps(page.export(view), ensure_ascii=False), gr.skip()
            except UserError as error:
                return "", html.message(str(error))

        blocks.load(load, query, [*outputs, text], js=ON_LOAD, **options)
        text.change(on_text, [text, state], outputs, trigger_mode="always_last", **options)
        models.input(on_models, [models, state], outputs, **options)
        gr.on([read.input, source.input], on_colour, [read, source, state], outputs, **options)
        for element in panes:
            element.click(on_click, state, outputs, **options)
        reset.click(on_reset, state, outputs, **options)
        for name, button in buttons.items():
            button.click(_example(name, page, shown), state, [*outputs, text], **options)
        query.change(None, query, js=SET_LINK)
        copy.click(None, js="() => attnresCopy()")
        save.click(on_json, state, [payload, message], **options).then(None, payload, js=DOWNLOAD)
    return blocks


def _example(name: str, page: Page, shown: Any) -> Any:
    def take(view: View) -> list[Any]:
        return [*shown(page.type(view, EXAMPLES[name])), EXAMPLES[name]]

    return take


def _updates(now: Shown) -> list[Any]:
    """New values of state, message, panes, models, read, source, query."""
    panes = [gr.update(value=pane, visible=True) for pane in now.panes]
    panes += [gr.update(value="", visible=False)] * (2 - len(panes))
    return [
        now.view,
        html.message(now.message),
        *panes,
        ".".join(map(str, now.view.models)),
        gr.update(choices=now.reads, value=-1 if now.view.read is None else now.view.read),
        gr.update(choices=now.sources, value=now.view.source),
        f"?{now.query}" if now.query else "",
    ]


def serve(page: Page, *, host: str = "127.0.0.1", port: int = 7860, browser: bool = False) -> None:
    """Serve the page until Ctrl-C.

    Raises:
        UserError: a host that is not this machine's, or a port that is in use.
    """
    local = is_loopback(check_port(host, port))
    blocks = build(page)
    blocks.queue(max_size=QUEUE, default_concurrency_limit=1, api_open=False)
    try:
        blocks.launch(
            server_name=host,
            server_port=port,
            inbrowser=browser,
            prevent_thread_lock=True,
            share=False,
            quiet=True,
            footer_links=[],
            allowed_paths=[],
            max_file_size=1,
            enable_monitoring=False,
            ssr_mode=False,
            mcp_server=False,
            pwa=False,
            run_history=False,
            state_session_capacity=SESSIONS,
            app_kwargs={"middleware": [Middleware(Guard, local=local)], "docs_url": None, "redoc_url": None},
            theme=theme(),
            css=CSS,
            head=HEAD,
        )
    except OSError as error:
        raise UserError(f"cannot serve on {host}:{port}: {error}; choose another --port") from error
    names = listed([model.label for model in page.models])
    shown = f"[{host}]" if ":" in host else host
    print(f"{names}: open http://{shown}:{port} in a browser; Ctrl-C stops", flush=True)
    try:
        threading.Event().wait()
    finally:
        blocks.close(verbose=False)


def theme() -> gr.themes.Base:
    """Gradio's plain theme in the system's own fonts: none is fetched."""
    fonts = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"]
    mono = ["ui-monospace", "Menlo", "DejaVu Sans Mono", "monospace"]
    return gr.themes.Default(primary_hue="blue", neutral_hue="slate", font=fonts, font_mono=mono, text_size="sm")
