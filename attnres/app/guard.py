"""What a browser may ask the server for: its own page's questions, from this machine's own names, and nothing large.

The answers tell the browser to load nothing from other hosts, and to run no script but the page's file.
"""

import ipaddress
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

MAX_BODY = 200_000
"""Bytes of one request: a text and what belongs to it, many times over."""

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
        "frame-ancestors 'none'",
    )
)
_HEADERS = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)

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
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, length = headers.get(b"host", ""), headers.get(b"content-length", "0")
        if self.local and not _is_local(host):
            await _refuse(send, 421, b"this server answers on localhost only")
        elif headers.get(b"origin", f"http://{host}") not in (f"http://{host}", f"https://{host}"):
            await _refuse(send, 403, b"this page answers to itself only")
        elif not re.fullmatch("[0-9]{1,9}", length) or int(length) > MAX_BODY:
            await _refuse(send, 413, b"this is too much at once")
        elif b"transfer-encoding" in headers:
            await _refuse(send, 411, b"say how long it is")
        else:

            async def sending(message: MutableMapping[str, Any]) -> None:
                if message["type"] == "http.response.start":
                    message = {**message, "headers": [*message.get("headers", []), *_HEADERS]}
                await send(message)

            await self.app(scope, receive, sending)


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


async def _refuse(send: Send, status: int, words: bytes) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), *_HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": words})
