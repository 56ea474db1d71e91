"""The client of the judge: what passes is asked again, what does not is raised, and it does not ask for ever."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from experiments.examples import http_judge


class Moody(ThreadingHTTPServer):
    """Answers with the next of its codes, 0 for a connection that ends without a word, then with 200."""

    codes: list[int]
    seen: int = 0


class Handler(BaseHTTPRequestHandler):
    server: Moody

    def do_GET(self) -> None:
        self.server.seen += 1
        code = self.server.codes.pop(0) if self.server.codes else 200
        if code == 0:
            self.close_connection = True
            return
        self.send_response(code)
        if code == 429:
            self.send_header("Retry-After", "7")
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.fixture
def server() -> Iterator[Moody]:
    made = Moody(("127.0.0.1", 0), Handler)
    made.codes = []
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def ask(port: int) -> tuple[bytes, list[float]]:
    pauses: list[float] = []
    request = urllib.request.Request(f"http://127.0.0.1:{port}")
    return http_judge.asked(request, sleep=pauses.append), pauses


def test_what_passes_is_asked_again_after_longer_and_longer(server: Moody) -> None:
    server.codes = [503, 0, 500]
    assert ask(server.server_port) == (b"ok", [0.5, 1.0, 2.0])


def test_a_server_that_says_when_is_obeyed(server: Moody) -> None:
    server.codes = [429, 502]
    assert ask(server.server_port) == (b"ok", [7.0, 1.0])


@pytest.mark.parametrize("code", [400, 401, 404])
def test_what_would_be_the_same_again_is_raised_at_once(server: Moody, code: int) -> None:
    server.codes = [code]
    with pytest.raises(urllib.error.HTTPError, match=str(code)):
        ask(server.server_port)
    assert server.seen == 1


def test_it_gives_up_and_says_how_often_it_asked_and_why(server: Moody) -> None:
    server.codes = [503] * 9
    with pytest.raises(ConnectionError, match=r"was asked 6 times .* HTTP 503 .*JUDGE_URL"):
        ask(server.server_port)
    assert server.seen == 6


def test_a_server_that_is_not_there_is_asked_as_often() -> None:
    with Moody(("127.0.0.1", 0), Handler) as gone:
        port = gone.server_port
    with pytest.raises(ConnectionError, match=r"was asked 6 times .*[Rr]efused"):
        ask(port)
