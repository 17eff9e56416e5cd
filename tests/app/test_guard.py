"""The server answers with the page and its events; files, uploads, proxies and other hosts' names do not exist."""

import asyncio

import pytest

from attnres.app.guard import MAX_BODY, Guard


async def inner(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"page"})


def ask(path, local=True, **headers):
    said = []

    async def send(message):
        said.append(message)

    headers = {"host": "127.0.0.1:7860"} | headers
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(Guard(inner, local)({"type": "http", "path": path, "headers": raw}, None, send))
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


@pytest.mark.parametrize("host", ["localhost", "localhost:1", "127.0.0.1:7860", "[::1]:7860", "[::1]"])
def test_a_local_server_answers_to_local_names(host):
    assert ask("/", host=host)[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7860", "127.0.0.1.evil.example", ""])
def test_and_to_no_others(host):
    assert ask("/", host=host)[0] == 421
    assert ask("/", local=False, host=host)[0] == 200


def test_large_requests_are_refused():
    assert ask("/gradio_api/queue/join", content_length=str(MAX_BODY))[0] == 200
    assert ask("/gradio_api/queue/join", content_length=str(MAX_BODY + 1))[0] == 413
    assert ask("/gradio_api/queue/join", content_length="many")[0] == 413
    assert ask("/gradio_api/queue/join", transfer_encoding="chunked")[0] == 411
