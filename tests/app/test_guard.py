"""The server answers its own page, under this machine's own names, and nothing large."""

import asyncio
import socket

import pytest

from attnres.app import listen
from attnres.app.server import MAX_BODY, Guard, is_loopback, own_names
from attnres.errors import UserError


async def inner(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"page"})


def ask(path, local=True, names=(), **headers):
    calls = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        calls.append(message)

    headers = {"host": "127.0.0.1:7860"} | headers
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(Guard(inner, local, names)({"type": "http", "path": path, "headers": raw}, receive, send))
    return calls[0]["status"], dict(calls[0]["headers"])


def test_the_page_loads_nothing_from_elsewhere_and_runs_no_script_but_its_file():
    status, headers = ask("/")
    assert status == 200
    policy = headers[b"content-security-policy"].decode()
    assert "default-src 'none'" in policy and "http" not in policy and "*" not in policy
    assert "script-src 'self';" in policy and not any(name.startswith(b"access-control") for name in headers)


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "localhost.:1", "127.0.0.1:7860", "127.0.0.2", "[::1]:7860", "[::1]"]
)
def test_a_local_server_answers_to_local_names(host):
    assert ask("/", host=host)[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7860", "127.0.0.1.evil.example", ""])
def test_and_to_no_others(host):
    assert ask("/", host=host)[0] == 421


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("192.168.1.5:7860", 200),
        ("[fd00::5]:7860", 200),
        ("localhost", 200),
        ("gpu-server:7860", 200),
        ("GPU-server.lab.example.:7860", 200),
        ("gpu-server.local", 200),
        ("alias.example:7860", 200),
        ("evil.example:7860", 421),
        ("192.168.1.5.evil.example", 421),
        ("gpu-server.evil.example", 421),
    ],
)
def test_a_server_that_others_reach_answers_to_addresses_and_its_own_names(host, status, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-server")
    monkeypatch.setattr(socket, "getfqdn", lambda: "gpu-server.lab.example")
    assert ask("/", local=False, names=own_names("alias.example"), host=host)[0] == status


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "::1", "0:0:0:0:0:0:0:1", "0.0.0.0", "10.0.0.1", "x"])
def test_the_bound_address_says_whether_a_server_is_local(address):
    assert is_loopback(address) is (address not in ("0.0.0.0", "10.0.0.1", "x"))


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.2", 421), ("LOCALHOST", 421), ("0:0:0:0:0:0:0:1", 421), ("0.0.0.0", 200)],
)
def test_other_spellings_of_this_machine_are_this_machine(host, status):
    try:
        with listen(host, 0) as listener:
            address = listener.getsockname()[0]
    except UserError as error:
        pytest.skip(str(error))
    assert ask("/", local=is_loopback(address), host="192.168.1.5")[0] == status


@pytest.mark.parametrize("origin", ["http://evil.example", "http://localhost:7861", "null", "http://127.0.0.1:7860.a"])
def test_pages_of_others_are_not_answered(origin):
    assert ask("/", origin=origin)[0] == 403
    assert ask("/", local=False, origin=origin)[0] == 403


def test_large_requests_are_refused():
    assert ask("/show", content_length=str(MAX_BODY))[0] == 200
    assert ask("/show", content_length=str(MAX_BODY + 1))[0] == 413
    assert ask("/show", content_length="many")[0] == 413
    assert ask("/show", transfer_encoding="chunked")[0] == 411


def test_a_name_that_no_host_can_have_is_refused():
    with pytest.raises(UserError, match=r"cannot serve on aaaa.*label too long"):
        listen("a" * 300, 49517)
