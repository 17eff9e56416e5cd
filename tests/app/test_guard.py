"""The server answers with the page and its events; files, uploads, proxies and other hosts' names do not exist."""

import asyncio
import json

import pytest

from attnres.app.address import check_port
from attnres.app.guard import MAX_BODY, Guard, is_loopback
from attnres.errors import UserError


async def inner(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"page"})


async def open_to_all(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"Access-Control-Allow-Origin", b"*")]})


async def failing(scope, receive, send):
    raise KeyError("no such session")


async def angry(scope, receive, send):
    await send({"type": "http.response.start", "status": 500, "headers": []})


def ask(
    path,
    local=True,
    inside=inner,
    body=b'{"data": [], "fn_index": 0, "session_hash": "a"}',
    **headers,
):
    said, parts = [], iter([{"type": "http.request", "body": body[:9], "more_body": True}])

    async def receive():
        return next(parts, {"type": "http.request", "body": body[9:], "more_body": False})

    async def send(message):
        said.append(message)

    headers = {"host": "127.0.0.1:7860"} | headers
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(Guard(inside, local)({"type": "http", "path": path, "headers": raw}, receive, send))
    return said[0]["status"], dict(said[0]["headers"])


@pytest.mark.parametrize("path", ["/", "/config", "/theme.css", "/assets/index.js", "/gradio_api/queue/join"])
def test_the_page_is_there_and_loads_nothing_from_elsewhere(path):
    status, headers = ask(path)
    assert status == 200
    policy = headers[b"content-security-policy"].decode()
    assert "default-src 'self'" in policy and "http" not in policy and "*" not in policy


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/file=/etc/passwd",
        "/gradio_api/upload",
        "/gradio_api/proxy=http://a",
        "/gradio_api/vibe-edit/",
        "/file=a",
        "/gradio_api/run/predict",
        "/gradio_api/api/x",
        "/gradio_api/call/x",
        "/monitoring",
        "/login",
        "/gradio_api/queue/join/x",
    ],
)
def test_nothing_else_is(path):
    assert ask(path)[0] == 404


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "localhost.:1", "127.0.0.1:7860", "127.0.0.2", "[::1]:7860", "[::1]"]
)
def test_a_local_server_answers_to_local_names(host):
    assert ask("/", host=host)[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7860", "127.0.0.1.evil.example", ""])
def test_and_to_no_others(host):
    assert ask("/", host=host)[0] == 421
    assert ask("/", local=False, host=host)[0] == 200


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "::1", "0:0:0:0:0:0:0:1", "0.0.0.0", "10.0.0.1", "x"])
def test_the_bound_address_says_whether_a_server_is_local(address):
    assert is_loopback(address) is (address not in ("0.0.0.0", "10.0.0.1", "x"))


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.2", 421), ("LOCALHOST", 421), ("0:0:0:0:0:0:0:1", 421), ("0.0.0.0", 200)],
)
def test_other_spellings_of_this_machine_are_this_machine(host, status):
    try:
        address = check_port(host, 49517)
    except UserError as error:
        pytest.skip(str(error))
    assert ask("/", local=is_loopback(address), host="evil.example")[0] == status


@pytest.mark.parametrize("origin", ["http://evil.example", "http://localhost:7861", "null", "http://127.0.0.1:7860.a"])
def test_pages_of_others_are_not_answered(origin):
    assert ask("/", origin=origin)[0] == 403
    assert ask("/", local=False, origin=origin)[0] == 403


def test_no_other_page_may_read_the_answer():
    status, headers = ask("/", inside=open_to_all, origin="http://127.0.0.1:7860")
    assert status == 200 and not any(name.startswith(b"access-control") for name in headers)


EVENT = {"data": [None], "fn_index": 0, "session_hash": "a"}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (json.dumps(EVENT), 200),
        (json.dumps(EVENT | {"trigger_id": 3, "event_data": {"a": [1]}}), 200),
        ("", 400),
        ("[" * 5000, 400),
        (b"\xff", 400),
        ("[]", 400),
        (json.dumps(EVENT | {"fn_index": "0"}), 400),
        (json.dumps(EVENT | {"fn_index": 10**30}), 400),
        (json.dumps(EVENT | {"data": {}}), 400),
        (json.dumps({"data": [], "fn_index": 0}), 400),
    ],
)
def test_an_event_is_what_the_page_sends(body, status):
    body = body if isinstance(body, bytes) else body.encode()
    assert ask("/gradio_api/queue/join", body=body)[0] == status


@pytest.mark.parametrize("path", ["/config", "/gradio_api/queue/join"])
def test_what_the_application_cannot_answer_is_no_error_of_the_server(path, capfd):
    assert ask(path, inside=failing, body=json.dumps(EVENT).encode())[0] == 400
    assert ask(path, inside=angry, body=json.dumps(EVENT).encode())[0] == 400
    assert capfd.readouterr() == ("", "")


def test_large_requests_are_refused():
    assert ask("/gradio_api/queue/join", content_length=str(MAX_BODY))[0] == 200
    assert ask("/gradio_api/queue/join", content_length=str(MAX_BODY + 1))[0] == 413
    assert ask("/gradio_api/queue/join", content_length="many")[0] == 413
    assert ask("/gradio_api/queue/join", transfer_encoding="chunked")[0] == 411
