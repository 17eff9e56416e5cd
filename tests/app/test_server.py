"""The server's answers: what the browser has is not sent again, and a mistake is one sentence here and there."""

import asyncio
import contextlib
import json

import pytest
import torch

pytest.importorskip("uvicorn", reason="the extra `app` is not installed")

from starlette.requests import ClientDisconnect

from attnres.app.page import Page
from attnres.app.server import application
from attnres.app.state import View
from attnres.inspect.texts import LookText

TEXT = "def read(rows, name):\n    return rows[name]\n"


@pytest.fixture
def ask(page):
    """Asks the page's server a question; gives status and the last line of the answer."""
    served = application(Page(page.models, LookText("a text", lambda: iter([TEXT]))), local=True)

    def asked(path, **question):
        body, sent = json.dumps(question).encode(), []
        heads = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        came = iter([{"type": "http.request", "body": body}])

        async def receive():
            message = next(came, None)
            return message if message is not None else await asyncio.Event().wait()

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": f"/{path}", "headers": heads, "query_string": b""}
        scope |= {"http_version": "1.1", "scheme": "http", "server": ("localhost", 80), "root_path": ""}
        try:
            asyncio.run(served(scope, receive, send))
        except Exception:  # which the server above hears of, too, once it has been answered
            assert sent
        whole = b"".join(message.get("body", b"") for message in sent)
        return sent[0]["status"], json.loads(whole.splitlines()[-1])

    return asked


def test_a_view_of_other_models_is_none_of_these(ask, page):
    view = View(TEXT).to_json()
    assert ask("show", view=view, models=page.keys)[0] == 200
    for path in ("show", "score"):
        status, answer = ask(path, view=view, models=page.keys[::-1])
        assert status == (400 if path == "show" else 200) and "load the page again" in answer["error"]


@pytest.mark.parametrize("path", ["show", "patch", "score", "search"])
@pytest.mark.parametrize("amid", ["question", "answer"])
def test_who_goes_amid_a_question_or_its_answer_is_nobodys_mistake(page, path, amid, capsys):
    served = application(Page(page.models, LookText("a text", lambda: iter([TEXT]))), local=True)
    body = json.dumps({"view": View(TEXT, read=3, other=TEXT[::-1]).to_json()}).encode()
    whole = {"type": "http.request", "body": body}
    half = {"type": "http.request", "body": body[:10], "more_body": True}
    came = iter([half, {"type": "http.disconnect"}] if amid == "question" else [whole])

    async def receive():
        message = next(came, None)
        return message if message is not None else await asyncio.Event().wait()

    async def send(message):
        if amid == "answer":
            raise BrokenPipeError("nobody is there")

    scope = {"type": "http", "method": "POST", "path": f"/{path}", "query_string": b"", "scheme": "http"}
    scope |= {"headers": [(b"host", b"localhost"), (b"content-type", b"application/json")], "root_path": ""}
    scope |= {"http_version": "1.1", "server": ("localhost", 80), "asgi": {"version": "3.0", "spec_version": "2.4"}}
    with contextlib.suppress(ClientDisconnect, BrokenPipeError):  # the server above hears of it
        asyncio.run(served(scope, receive, send))
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("path", ["show", "patch", "score", "search"])
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("on\ntwo lines"), "a mistake of attnres"),
        (MemoryError(), "not enough memory"),
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), "not enough memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "not enough memory"),
    ],
)
def test_what_nobody_foresaw_is_one_sentence_here_and_there(ask, path, error, words, monkeypatch, capsys):
    def fail(*args):
        raise error

    for name in ("show", "patch", "score", "search"):
        monkeypatch.setattr(Page, name, fail)
    status, answer = ask(path, view=View(TEXT).to_json())
    said = capsys.readouterr().err.splitlines()
    assert words in answer["error"] and status == (500 if path == "show" else 200)
    assert len(said) == 1 and said[0].startswith(f"attnres: error: {answer['error']} ({type(error).__name__}: ")
