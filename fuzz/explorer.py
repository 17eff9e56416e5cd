"""Malformed requests to the explorer: none ends in a status of 500 or a traceback, and the page still answers."""

import contextlib
import http.client
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path

from attnres.app.state import Cut, View
from fuzz.material import Material
from fuzz.mutations import ODD, mutate
from fuzz.tally import Tally

ROUTES = ("/", *("/show",) * 12, *("/patch", "/score", "/search") * 3)
HOSTILE = (
    *("//", "/%ff", "/%00", "/\\..\\..", "/?" + "a=b&" * 2000, "/?t=" + "A" * 4000, "/?t=eJzbwMAAAAB", "/..;/"),
    *("/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/assets/../../etc/passwd", "/static/%00", "/file=/etc/passwd"),
    *("/page.js/..", "/show/%00", "/.git/config", "/upload", "/proxy=http://a", "/api/predict", "/docs", "/page.html"),
    *("/openapi.json", "/monitoring", "/favicon.ico", "/robots.txt", "/config", "/admin", "/" + "a" * 9000),
)
"""Asked of any server; what else this one may answer to is taken from its page."""
VIEW = View("def read(rows):\n    return rows", token=2, cuts=(Cut(0, 3, 1), Cut(0, 2, 0, 1))).to_json()
EVENT = {"view": VIEW, "link": "?m=run~0123456789ab", "place": 0, "least": False}


@contextlib.contextmanager
def explorer(material: Material) -> Generator[tuple[int, Path]]:
    """The explorer on a port; gives the port and the file of what it says on its terminal."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    said = material.root / "explorer.log"
    with said.open("wb") as file:
        words = [sys.executable, "-m", "attnres", "app", str(material.run), "--port", str(port)]
        process = subprocess.Popen(words, stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        until = time.monotonic() + 240
        while _status(port, "GET", "/", {}, b"") != 200:
            assert process.poll() is None and time.monotonic() < until, said.read_text()
            time.sleep(0.2)
        yield port, said
    finally:
        process.terminate()
        process.wait()


def try_requests(material: Material, tally: Tally, cases: int, *, more: Callable[[], bool] = lambda: True) -> None:
    """Send so many requests, four at a time, and look at the terminal and the page afterwards."""
    if not more():
        return
    with explorer(material) as (port, said):
        paths = [*ROUTES, *HOSTILE, *addresses(port)]
        for first in range(0, cases, 4):
            if not more():
                break
            numbers = [tally.tried("requests") + place for place in range(min(4, cases - first))]
            answers: dict[int, str] = {}
            senders = [threading.Thread(target=_send, args=(port, number, paths, answers)) for number in numbers]
            for sender in senders:
                sender.start()
            for sender in senders:
                sender.join()
            for number in numbers:
                tally.count("requests", answers[number], f"seed {number}")
        text = said.read_text(errors="replace")
        unforeseen = "Traceback" in text or "a mistake of attnres" in text
        tally.count("terminal", "traceback" if unforeseen else "done", "explorer", said=text[-2000:])
        tally.count("terminal", "done" if _status(port, "GET", "/", {}, b"") == 200 else "different", "the page")


def addresses(port: int) -> list[str]:
    """What the page and its scripts name on its own server."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    paths: set[str] = set()
    pages = ["/"]
    for page in pages:
        connection.request("GET", page)
        text = connection.getresponse().read().decode("utf-8", "replace")
        named = {
            f"/{name.lstrip('./')}" for name in re.findall(r"[\"'`(](\.{0,2}/[A-Za-z0-9_./-]{2,80})[\"'`)?]", text)
        }
        if page == "/":
            pages += sorted(name for name in named if name.endswith(".js"))[:12]
        paths |= named
    connection.close()
    return sorted(paths)[:400]


def _send(port: int, number: int, paths: list[str], answers: dict[int, str]) -> None:
    draw = random.Random(number)
    path, method = draw.choice(paths), draw.choice(("GET", "POST", "POST", "PUT", "HEAD", "OPTIONS"))
    body = json.dumps(EVENT).encode()
    for _ in range(draw.choice((0, 1, 1, 2))):
        body = mutate(body, draw, "json")
    headers = {"content-type": draw.choice(("application/json", "text/plain", "multipart/form-data"))}
    if draw.random() < 0.2:
        name = draw.choice(("origin", "host", "content-length", "transfer-encoding", "cookie", "range", "accept"))
        headers[name] = str(draw.choice(("null", "evil.example", "-1", "chunked", *map(repr, ODD))))[:100]
    status = _leave(port, path, body) if draw.random() < 0.1 else _status(port, method, path, headers, body)
    answers[number] = "no answer" if status is None else f"status {status // 100}xx"


def _leave(port: int, path: str, body: bytes) -> None:
    """Send a request but for its last byte, and hang up."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost:{port}\r\ncontent-type: application/json\r\n"
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(f"{head}content-length: {len(body) + 1}\r\n\r\n".encode("ascii", "replace") + body)


def _status(port: int, method: str, path: str, headers: dict[str, str], body: bytes) -> int | None:
    """The status of an answer; None where the server closed the connection or streams without an end."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        safe = {name: value.encode("ascii", "replace").decode().replace("\n", " ") for name, value in headers.items()}
        connection.request(method, path.encode("ascii", "replace").decode().replace(" ", "%20"), body, safe)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
