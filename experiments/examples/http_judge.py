"""A reward from another machine: a judge behind HTTP, and a client that a training calls.

python -m experiments.examples.http_judge [port=8765] [latency_s=0.1]      the judge: right or wrong, after latency_s

JUDGE_URL=http://127.0.0.1:8765 python experiments/train_llm_math.py run.dir=runs/judged reward.concurrency=16
    reward._target_=experiments.examples.http_judge.judged reward.waits=true cluster.waiting_devices=1

The judge here compares numbers; a real one is a model or a tool that takes as long.  Waiting for it keeps
no core busy: with a waiting device the planner can let generation continue meanwhile.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from rlinf_embodied.command_line import main
from rlinf_embodied.data.problems import Problem

URL = "JUDGE_URL"  # the variable that says where the judge is
_TIMEOUT_S = 60.0
_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # before each further attempt


def judged(completion: str, problem: Problem) -> float:
    """Returns what the judge says of a completion.

    Raises:
        urllib.error.HTTPError: the judge refuses the request.
        ConnectionError: no answer after several attempts, or server errors only.
    """
    body = json.dumps({"completion": completion, "answer": problem.answer}).encode()
    request = urllib.request.Request(os.environ[URL], body, {"Content-Type": "application/json"})
    error: Exception | None = None
    for pause_s in (0.0, *_PAUSES_S):
        time.sleep(pause_s)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                return float(json.loads(answer.read())["score"])
        except (OSError, http.client.HTTPException) as failure:  # no connection, or no whole answer in time
            if isinstance(failure, urllib.error.HTTPError) and failure.code < 500:
                raise
            error = failure
    raise ConnectionError(
        f"{request.full_url} did not answer in {len(_PAUSES_S) + 1} attempts, last: {error}"
    ) from error


@dataclass(kw_only=True)
class Options:
    """The arguments of the judge."""

    port: int = 8765  # 0: any
    latency_s: float = 0.1  # that it thinks about each completion


def make_server(own: Options) -> ThreadingHTTPServer:
    """Returns the judge, which thinks about all completions that it is sent at once."""

    class Judge(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            time.sleep(own.latency_s)
            right = asked["completion"].rpartition("#")[2].strip() == asked["answer"]
            body = json.dumps({"score": float(right)}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    class Server(ThreadingHTTPServer):
        request_queue_size = 1024
        daemon_threads = True

    return Server(("127.0.0.1", own.port), Judge)


def serve(own: Options) -> None:
    server = make_server(own)
    print(f"export {URL}=http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(serve, Options)
