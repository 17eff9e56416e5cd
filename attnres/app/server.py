"""The HTTP server of the page: routes of its files and of questions in JSON, and a guard over requests."""

import ipaddress
import json
import queue
import re
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable, Collection, Iterator, Sequence
from html import escape
from importlib.resources import files
from typing import Any, TypedDict

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attnres.app.page import EXAMPLES, Page
from attnres.app.state import MAX_CHARACTERS, View, from_json
from attnres.errors import UserError, is_out_of_memory
from attnres.inspect.notebook import alone
from attnres.reading import parse_json
from attnres.text import listed, one_line
from attnres.typed import Count, checked

Report = Callable[..., None]
"""Called with how much is done of how much, and what there is so far; what it raises ends the work."""
MAX_BODY = 200_000
"""Bytes of one request: a text and what belongs to it, many times over."""

FRAMES = "http://localhost:* http://127.0.0.1:* https://localhost:* vscode-webview:"
"""Where a notebook on this machine shows the page within its own."""
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        # Colours of cells and tokens are style attributes.
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "connect-src 'self'",
        "form-action 'none'",
        "base-uri 'none'",
        "frame-ancestors ",
    )
)
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


class Guard:
    """ASGI middleware around the whole application.

    Args:
        local: the server listens on this machine alone: answer only to its local names, so that a foreign page
            cannot reach it through a name that it points here.
        names: to which a server that others reach answers, too, besides addresses and names without a dot, which no
            foreign page can have.
        framed: a notebook on this machine may show the page within its own.
    """

    def __init__(self, app: ASGIApp, local: bool, names: Collection[str] = (), framed: bool = False) -> None:
        self.app, self.local, self.names = app, local, names
        self.headers = {**_HEADERS, "content-security-policy": _POLICY + (FRAMES if framed else "'none'")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message.setdefault("headers", [])
                MutableHeaders(scope=message).update(self.headers)
            await send(message)

        refusal = self._refusal(Headers(scope=scope))
        await (PlainTextResponse(refusal[1], refusal[0]) if refusal else self.app)(scope, receive, sending)

    def _refusal(self, headers: Headers) -> tuple[int, str] | None:
        """Return the status and words of a request that is not answered, or None.

        Starlette's TrustedHostMiddleware knows neither IPv6 hosts nor every address of a network.
        """
        host, length = headers.get("host", ""), headers.get("content-length", "0")
        name = _name(host)
        if self.local and not (name == "localhost" or is_loopback(name)):
            return 421, "this server answers on localhost only"
        if not self.local and "." in name and _address(name) is None and name not in self.names:
            return 421, (
                "this server does not know the name that it was asked by: open it by the address of its machine, or "
                "start it with --names and this name"
            )
        if headers.get("origin", f"http://{host}") not in (f"http://{host}", f"https://{host}"):
            return 403, "this page answers to itself only"
        if not re.fullmatch("[0-9]{1,9}", length) or int(length) > MAX_BODY:
            return 413, "this is too much at once"
        if "transfer-encoding" in headers:
            return 411, "say how long it is"
        return None


def is_loopback(address: str) -> bool:
    """Return whether a numeric address reaches this machine alone."""
    parsed = _address(address)
    return parsed is not None and parsed.is_loopback


def own_names(*others: str) -> set[str]:
    """Return names of this machine: `others`, its host name, and its name on the local network."""
    host_name = socket.gethostname()
    names = (*others, host_name, socket.getfqdn(), f"{host_name.partition('.')[0]}.local")
    return {name.lower().rstrip(".") for name in names}


def _name(header: str) -> str:
    """Return the host of a Host header, without port and brackets, in small letters."""
    name = header.rsplit(":", 1)[0] if re.search(r":[0-9]+$", header) else header
    return name.lower().rstrip(".").removeprefix("[").removesuffix("]")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return a numeric address; None of a name."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


MISTAKE = "a mistake of attnres: a report of it is welcome"
FULL = "there is not enough memory for this: take a shorter text, or one model alone"


class Question(TypedDict, total=False):
    """The body of a question.

    view: what the browser shows; None asks for what `link`, a query string, says.
    place: of the model that is scored, among those shown. least: which end of a search. threshold: nats of an effect
        below which a graph's links are left out.
    models: the keys of the models that the browser's page was made for, by whose numbers its view speaks.
    """

    view: Any
    link: str
    place: Count
    least: bool
    threshold: float
    models: list[str]


def application(page: Page, *, local: bool, names: Collection[str] = (), framed: bool = False) -> Starlette:
    """Make the page an ASGI application; `local`, `names` and `framed` as in `Guard`."""

    def show(question: Question) -> dict[str, Any]:
        return page.show(*_view(page, question))

    def score(question: Question, report: Report) -> dict[str, Any]:
        view, place = _view(page, question)[0], question.get("place", 0)
        if place >= len(view.models):
            raise UserError("this model is not shown: load the page again")
        number = view.models[place]
        return page.score(view, number, lambda done, whole: report(done, whole, page.scored(view, number)))

    def search(question: Question, report: Report) -> dict[str, Any]:
        return page.search(_view(page, question)[0], question.get("least", False), report)

    def patch(question: Question, report: Report) -> dict[str, Any]:
        return page.patch(_view(page, question)[0], report)

    def circuit(question: Question, report: Report) -> dict[str, Any]:
        return page.circuit(_view(page, question)[0], report)

    def neuronpedia(question: Question) -> dict[str, Any]:
        return page.neuronpedia(_view(page, question)[0], question.get("threshold", 0.0))

    begin = {
        "examples": {name: page.beginning(text) for name, text in EXAMPLES.items()},
        "characters": MAX_CHARACTERS,
        "corpus": page.corpus.name if page.corpus is not None else None,
        "models": page.keys,
        "choices": page.choices,
    }
    whole = files("attnres.app").joinpath("page.html").read_text("utf-8")
    whole = whole.replace("{{begin}}", escape(json.dumps(begin)))
    texts = {
        "/": (whole, "text/html"),
        "/page.js": (files("attnres.app").joinpath("page.js").read_text("utf-8"), "text/javascript"),
        "/page.css": (files("attnres.app").joinpath("page.css").read_text("utf-8"), "text/css"),
        "/alone": (alone(None), "text/plain"),
    }
    routes = [
        *(Route(path, _text(text, kind)) for path, (text, kind) in texts.items()),
        Route("/show", _answer(show), methods=["POST"]),
        Route("/score", _stream(score), methods=["POST"]),
        Route("/search", _stream(search), methods=["POST"]),
        Route("/patch", _stream(patch), methods=["POST"]),
        Route("/circuit", _stream(circuit), methods=["POST"]),
        Route("/neuronpedia", _answer(neuronpedia), methods=["POST"]),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(Guard, local=local, names=names, framed=framed)],
        exception_handlers={Exception: _failed},
    )


def _failed(request: Request, error: Exception) -> Response:
    """Return the answer to a request that failed; a client that has disconnected gets status 400 and no report."""
    gone = isinstance(error, ClientDisconnect | ConnectionError)
    return Response(status_code=400) if gone else JSONResponse({"error": _unforeseen(error)}, 500)


def _unforeseen(error: Exception) -> str:
    """Return one sentence for the page about an unexpected exception, and print the exception to stderr."""
    words = FULL if is_out_of_memory(error) else MISTAKE
    print(f"attnres: error: {words} ({type(error).__name__}: {one_line(str(error))})", file=sys.stderr, flush=True)
    return words


def _view(page: Page, question: Question) -> tuple[View, str]:
    """Return the view of a question, and the error of its link, if any."""
    if question.get("view") is None:
        return page.begin(question.get("link", ""))
    if question.get("models", page.keys) != page.keys:
        raise UserError("other models are open here now: load the page again")
    return from_json(question["view"], len(page.models)), ""


def _text(text: str, kind: str) -> Callable[[Request], Response]:
    response = Response(text, media_type=kind)

    def answer(request: Request) -> Response:
        return response

    return answer


async def _question(request: Request) -> Question:
    """Read the question. Raises UserError."""
    body = await request.body()
    try:
        text = body.decode()
    except UnicodeDecodeError:
        raise UserError("the question is no UTF-8: load the page again") from None
    return checked(parse_json(text, "the question"), Question, "the question", "load the page again")


def _answer(make: Callable[[Question], dict[str, Any]]) -> Callable[..., Any]:
    """Make the route of a question that is answered in one piece; a mistake is a sentence, and status 400."""

    async def answer(request: Request) -> Response:
        try:
            return JSONResponse(await run_in_threadpool(make, await _question(request)))
        except UserError as error:
            return JSONResponse({"error": str(error)}, 400)

    return answer


def _stream(make: Callable[[Question, Report], dict[str, Any]]) -> Callable[..., Any]:
    """Make the route of a question that takes a while: lines of JSON say how much is done, the last is the answer."""

    async def answer(request: Request) -> Response:
        try:
            question = await _question(request)
        except UserError as error:
            return JSONResponse({"error": str(error)}, 400)
        return StreamingResponse(_lines(lambda report: make(question, report)), media_type="application/x-ndjson")

    return answer


class _Gone(Exception):
    """Nobody waits for the answer any more."""


def _lines(work: Callable[[Report], dict[str, Any]]) -> Iterator[str]:
    """Run `work` in a thread; yield its reports, then its result, as lines of JSON. A client that leaves ends it."""
    lines: queue.Queue[dict[str, Any]] = queue.Queue()
    left = threading.Event()

    def report(done: int, whole: int, partial: Any = None) -> None:
        if left.is_set():
            raise _Gone
        lines.put({"part": done / max(1, whole), "partial": partial})

    def run() -> None:
        try:
            lines.put(work(report))
        except UserError as error:
            lines.put({"error": str(error)})
        except _Gone:
            pass
        except Exception as error:
            lines.put({"error": _unforeseen(error)})

    threading.Thread(target=run, daemon=True).start()
    try:
        while True:
            line = lines.get()
            yield json.dumps(line) + "\n"
            if "part" not in line:
                return
    finally:
        left.set()


class Explorer:
    """The explorer of models in memory, served by a thread of this process until `close`.

    Args:
        listener: a listening socket of 127.0.0.1, which `close` closes.

    Attributes:
        url: of the page.
    """

    def __init__(self, page: Page, listener: socket.socket) -> None:
        self._listener = listener
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(
            application(page, local=True, framed=True), log_level="critical", lifespan="off", server_header=False
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving; a second call does nothing."""
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()

    def __enter__(self) -> "Explorer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Explorer({self.url}{'' if self._thread.is_alive() else ', closed'})"

    def _repr_html_(self) -> str:
        return (
            f'<iframe src="{self.url}" style="width:100%;height:820px;border:1px solid #ccc" title="attnres explorer">'
            f'</iframe><p><a href="{self.url}" target="_blank">{self.url}</a></p>'
        )


def run(page: Page, listener: socket.socket, *, host: str, names: Sequence[str] = (), browser: bool = False) -> None:
    """Serve the page until Ctrl-C.

    Args:
        listener: a listening socket of `host` (`attnres.app.listen`).
        names: by which others ask for it besides the machine's own, where `host` lets them.
    """
    address, port = listener.getsockname()[:2]
    local = is_loopback(address)
    served = application(page, local=local, names=() if local else own_names(host, *names))
    config = uvicorn.Config(served, log_level="critical", lifespan="off", server_header=False)
    shown = f"[{host}]" if ":" in host else host
    models = listed([model.label for model in page.models])
    print(f"{models}: open http://{shown}:{port} in a browser; Ctrl-C stops", flush=True)
    if browser:
        webbrowser.open(f"http://{shown}:{port}")
    uvicorn.Server(config).run(sockets=[listener])
