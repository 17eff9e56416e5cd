"""What a browser may ask the server for: its own page's questions, from this machine's own names, and nothing large.

The answers tell the browser to load nothing from other hosts, and to run no script but the page's file.
"""

import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Collection, MutableMapping
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

_FOREIGN = (
    b"this server does not know the name that it was asked by: open it by the address of its machine, or start it with "
    b"--names and this name"
)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Guard:
    """ASGI middleware around the whole application.

    Args:
        local: the server listens on this machine alone: answer only to its local names, so that a foreign page
            cannot reach it through a name that it points here.
        names: to which a server that others reach answers, too, besides addresses and names without a dot, which no
            foreign page can have.
    """

    def __init__(
        self, app: Callable[[Scope, Receive, Send], Awaitable[None]], local: bool, names: Collection[str] = ()
    ) -> None:
        self.app, self.local, self.names = app, local, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, length = headers.get(b"host", ""), headers.get(b"content-length", "0")
        name = _name(host)
        if self.local and not (name == "localhost" or is_loopback(name)):
            await _refuse(send, 421, b"this server answers on localhost only")
        elif not self.local and "." in name and not _is_address(name) and name not in self.names:
            await _refuse(send, 421, _FOREIGN)
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


def own_names(*given: str) -> set[str]:
    """Names of this machine: those given, what it calls itself, and its name on the local network."""
    own = socket.gethostname()
    names = (*given, own, socket.getfqdn(), f"{own.partition('.')[0]}.local")
    return {name.lower().rstrip(".") for name in names}


def _name(header: str) -> str:
    """What a Host header names, without port and brackets, in small letters."""
    name = header.rsplit(":", 1)[0] if re.search(r":[0-9]+$", header) else header
    return name.lower().rstrip(".").removeprefix("[").removesuffix("]")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


async def _refuse(send: Send, status: int, words: bytes) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), *_HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": words})
