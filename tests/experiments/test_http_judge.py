"""The client of the judge: server errors are retried, refusals are raised at once."""

from __future__ import annotations

import threading
import urllib.error
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from experiments.examples import http_judge
from rlinf_embodied.data.problems import Problem

CODES: list[int] = []  # the next answers, then 200


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = b'{"score": 0.5}'
        self.send_response(CODES.pop(0) if CODES else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""


@pytest.fixture
def judge(monkeypatch) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv(http_judge.URL, f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(http_judge, "_PAUSES_S", (0.0, 0.0))
    CODES.clear()
    yield
    server.shutdown()
    server.server_close()


@pytest.mark.usefixtures("judge")
def test_server_errors_are_retried_a_few_times_and_refusals_are_not() -> None:
    problem = Problem(0, "1+1=", "2", None, "sum", "sum2")
    CODES[:] = [503, 500]
    assert http_judge.judged("#2", problem) == 0.5
    CODES[:] = [401, 401]
    with pytest.raises(urllib.error.HTTPError, match="401"):
        http_judge.judged("#2", problem)
    assert CODES == [401]
    CODES[:] = [503] * 3
    with pytest.raises(ConnectionError, match=r"did not answer in 3 attempts, last: HTTP Error 503"):
        http_judge.judged("#2", problem)
