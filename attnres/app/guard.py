"""What a browser may ask the server for: the page, its assets and its events, and nothing else.

Gradio answers many more addresses (files, uploads, proxies, an API); here they do not exist. The answers tell the
browser to load nothing from other hosts.
"""

import ipaddress
import logging
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Required, TypedDict

from attnres.reading import parse_json
from attnres.typed import Count, checked

MAX_BODY = 200_000
"""Bytes of one request: a text and what belongs to it, many times over."""

_ALLOWED = re.compile(
    r"/|/(config|theme\.css|favicon\.ico|robots\.txt|manifest\.json)/?|/(assets|static|svelte)/.*"
    r"|/gradio_api/(info|startup-events|theme\.css|queue/(join|data)|cancel|reset|heartbeat/[^/]+)/?"
)
_POLICY = "; ".join(
    (
        "default-src 'self'",
        # Gradio makes its templates with `new Function` and starts from scripts in its page.
        "script-src 'self' 'unsafe-inline' 'unsafe-eval'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self' data:",
        "connect-src 'self'",
        "object-src 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)
_log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Joined(TypedDict, total=False):
    """The body of an event."""

    data: Required[list[Any]]
    fn_index: Required[Count]
    session_hash: Required[str]
    trigger_id: Count | None
    event_data: Any
    event_id: str | None


class Guard:
    """ASGI middleware around the whole application.

    Args:
        local: the server listens on this machine alone: answer only to its local names, so that a foreign page
            cannot reach it through a name that it points here.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], local: bool) -> None:
        self.app, self.local = app, local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, length = headers.get(b"host", ""), headers.get(b"content-length", "0")
        if self.local and not _is_local(host):
            await _refuse(send, 421, b"this server answers on localhost only")
        elif headers.get(b"origin", f"http://{host}") not in (f"http://{host}", f"https://{host}"):
            await _refuse(send, 403, b"this page answers to itself only")
        elif not _ALLOWED.fullmatch(scope["path"]):
            await _refuse(send, 404, b"there is nothing here")
        elif not re.fullmatch("[0-9]{1,9}", length) or int(length) > MAX_BODY:
            await _refuse(send, 413, b"this is too much at once")
        elif "transfer-encoding" in {name.decode("latin-1") for name in headers}:
            await _refuse(send, 411, b"say how long it is")
        else:
            await self._answer(scope, receive, send, event=scope["path"].rstrip("/").endswith("/queue/join"))

    async def _answer(self, scope: Scope, receive: Receive, send: Send, *, event: bool) -> None:
        """Hand the request on; one that is not understood gets 400 and no traceback, here or there."""
        answered = False

        async def sending(message: MutableMapping[str, Any]) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                answered = True
                theirs = [(name, value) for name, value in message.get("headers", []) if not _is_cors(name)]
                message = {**message, "headers": [*theirs, *_HEADERS]}
                if message["status"] >= 500:
                    message["status"] = 400
            await send(message)

        try:
            if event:
                body = await _body(receive)
                checked(parse_json(body.decode(), "the event"), Joined, "the event", "reload the page")
                receive = _again(body, receive)
            await self.app(scope, receive, sending)
        except Exception as error:  # whatever Gradio raises of a request that its own page does not make
            _log.debug("a request was not answered: %s", error, exc_info=error)
            if not answered:
                await _refuse(send, 400, b"this is not understood")


def is_loopback(address: str) -> bool:
    """Whether a numeric address reaches this machine alone."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _is_local(header: str) -> bool:
    """Whether a Host header names this machine as it names itself."""
    name = header.rsplit(":", 1)[0] if re.search(r":[0-9]+$", header) else header
    return name.lower().rstrip(".") == "localhost" or is_loopback(name.removeprefix("[").removesuffix("]"))


def _is_cors(name: bytes) -> bool:
    return name.lower().startswith(b"access-control-")


async def _body(receive: Receive) -> bytes:
    body, more = b"", True
    while more and len(body) <= MAX_BODY:
        message = await receive()
        body += message.get("body", b"")
        more = message["type"] == "http.request" and message.get("more_body", False)
    return body


def _again(body: bytes, receive: Receive) -> Receive:
    """What gives the body that was read once more, and then what comes after it."""
    first = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receiving() -> MutableMapping[str, Any]:
        return next(first, None) or await receive()

    return receiving


async def _refuse(send: Send, status: int, words: bytes) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), *_HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": words})
