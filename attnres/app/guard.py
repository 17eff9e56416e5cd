"""What a browser may ask the server for: the page, its assets and its events, and nothing else.

Gradio answers many more addresses (files, uploads, proxies, an API); here they do not exist. The answers tell the
browser to load nothing from other hosts.
"""

import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

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
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


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
        headers = dict(scope["headers"])
        if self.local and _host(headers.get(b"host", b"").decode("latin-1")) not in _LOOPBACK:
            await _refuse(send, 421, b"this server answers on localhost only")
        elif not _ALLOWED.fullmatch(scope["path"]):
            await _refuse(send, 404, b"there is nothing here")
        elif not headers.get(b"content-length", b"0").isdigit() or int(headers.get(b"content-length", b"0")) > MAX_BODY:
            await _refuse(send, 413, b"this is too much at once")
        elif b"chunked" in headers.get(b"transfer-encoding", b""):
            await _refuse(send, 411, b"say how long it is")
        else:
            await self.app(scope, receive, _with_headers(send))


def _host(header: str) -> str:
    return header.rsplit(":", 1)[0] if re.search(r":\d+$", header) else header


def _with_headers(send: Send) -> Send:
    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), *_HEADERS]
        await send(message)

    return sending


async def _refuse(send: Send, status: int, words: bytes) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), *_HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": words})
