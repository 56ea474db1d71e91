"""Agents: programs that talk to the model through an OpenAI client and know nothing of training.

    agent (a thread per episode) --POST /<episode>/v1/chat/completions--> server --turn--> generation
                                 <--------------- reply ------------------------- tokens --

`agent._target_` names a function `(problem, base_url) -> str | float`: it makes as many requests as it likes, also by
`openai.OpenAI(base_url=base_url, api_key="-")`, and returns a text, which the reward judges, or a number, which is the
reward.  A request is a turn: its messages become tokens as in episodes.py, so that what the model sampled is trained on
token for token.  All episodes of a block have asked, or are over, before the model answers: results are a function of
the agents' replies to what they read, and of nothing else.

With episodes.free the model answers each request as it comes.

Sampling is the run's.  A request may ask for fewer tokens (`max_tokens`, `max_completion_tokens`); another
`temperature` or `top_p` is refused, as training would take its tokens for others.  Further settings have no effect.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

from rlinf_embodied.config import AgentConfig, MathConfig
from rlinf_embodied.data.problems import Problem
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.language import ChatMessage, PromptCodec
from rlinf_embodied.plug_ins import load_plug_in
from rlinf_embodied.reasoning.batch import Asked, Prompt, Turn
from rlinf_embodied.reasoning.engine import Generated
from rlinf_embodied.reasoning.episodes import Episode
from rlinf_embodied.telemetry.progress import report_progress

_LOG = logging.getLogger(__name__)
Agent = Callable[[Problem, str], str | float]
_NAME = "policy"  # of the model
_LOOK_S = 1.0  # between two looks at the clock


def agent_of(config: AgentConfig) -> Agent | None:
    """Returns the function that agent._target_ names, None otherwise.

    Raises:
        ConfigError: it cannot be imported, or does not take (problem, base_url).
    """
    if config._target_ is None:
        return None
    return cast(Agent, load_plug_in(config._target_, "agent._target_", "problem", "base_url"))


class _Session:
    """An episode and the agent that drives it."""

    def __init__(self, episode: Episode) -> None:
        self.episode = episode
        self.asked: Prompt | None = None  # a turn that the model has not answered yet ...
        self.handed = False  # ... and whether it was handed to it
        self.over = False
        self.error = ""
        self.since = time.monotonic()  # when the agent was last at work


class AgentEpisodes:
    """The episodes of K problems, G of each, as their agents drive them."""

    def __init__(
        self, asked: Sequence[Asked], group_size: int, config: MathConfig, codec: PromptCodec, most: int | None
    ) -> None:
        """Starts a server and the agents; a row has up to `most` tokens, its prompt included."""
        agent, longest = agent_of(config.agent), config.generation.max_new_tokens
        assert agent is not None
        self._config, self._sampling = config.agent, config.generation
        self._changed = threading.Condition()
        self._closed = False
        begun = lambda one, g: Episode(one, g, codec, longest, most, each_turn=True)  # noqa: E731
        self._sessions = [_Session(begun(one, g)) for one in asked for g in range(group_size)]
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.episodes = self
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        for number in range(len(self._sessions)):
            threading.Thread(target=self._run, args=(agent, number), daemon=True).start()

    # --------------------------------------------------------------------------------------------------- of the agents
    def _run(self, agent: Agent, number: int) -> None:
        session, url = self._sessions[number], f"http://127.0.0.1:{self._server.server_port}/{number}/v1"
        try:
            found = agent(session.episode.problem, url)
            text, earned = (found, None) if isinstance(found, str) else (None, float(found))
            if earned is not None and not math.isfinite(earned):
                raise ValueError(f"it returned {found!r}, which is no reward")
        except Exception:  # noqa: BLE001 - a thread of the user's
            text, earned, error = None, 0.0, traceback.format_exc()
        else:
            error = ""
        with self._changed:
            if not session.over:
                session.over, session.episode.earned, session.error = True, earned, error
                session.episode.text = session.episode.text if text is None else text
            self._changed.notify_all()

    def reply(self, number: int, request: Mapping[str, Any]) -> tuple[str, str, int, int]:
        """Waits for the model's turn; returns its text, why it ended, and the tokens of prompt and turn.

        Raises:
            LookupError: there is no such episode, or it is over.
            ValueError: the request asks for what is not served, or there is no room for the turn.
            ConfigError: the tokenizer or its template refuses the messages.
        """
        chat, most = [_message(message) for message in request["messages"]], self._most(request)
        with self._changed:
            session = self._sessions[number]
            if session.over or session.asked is not None:
                raise LookupError("the episode is over, or waits for the reply to another request")
            if session.episode.turns >= self._config.max_requests:
                raise ValueError(f"agent.max_requests is {self._config.max_requests}, and that many were answered")
            prompt = session.episode.ask(chat)
            if prompt is None:
                raise ValueError(
                    "there is no room for these messages and a reply: context_length_exceeded (the model's "
                    "context, or algorithm.tokens_per_microbatch)"
                )
            session.asked = prompt if most is None else replace(prompt, room=min(most, prompt.room or most))
            self._changed.notify_all()
            self._changed.wait_for(lambda: session.asked is None or self._closed)
            if self._closed:
                raise LookupError("the episode was given up")
            row = session.episode.rows[-1]
            prompted = len(prompt.tokens)
            written = len(row.prompt) + len(row.tokens) - prompted
            return session.episode.text, "stop" if row.ended else "length", prompted, written

    def _most(self, request: Mapping[str, Any]) -> int | None:
        """Returns the tokens that a request asks for at most, None where it does not say."""
        for name in ("temperature", "top_p"):
            asked, own = request.get(name), getattr(self._sampling, name)
            if asked is not None and asked != own:
                raise ValueError(
                    f"{name} is {asked}, but all tokens are sampled with generation.{name}={own}, as training reads "
                    f"them so: leave it out of the request, or set generation.{name}={asked}"
                )
        most = next((request[n] for n in ("max_completion_tokens", "max_tokens") if request.get(n) is not None), None)
        if most is not None and (not isinstance(most, int) or most < 1):
            raise ValueError(f"max_tokens is {most!r}, and a reply has at least one token: use 1 or more")
        return most

    # ------------------------------------------------------------------------------------------------- of generation
    @property
    def over(self) -> bool:
        with self._changed:
            return all(session.over and session.asked is None for session in self._sessions)

    def turn(self, wait: bool = True) -> Turn | None:
        """Returns the requests that are new; with `wait` once every agent has asked or is over."""
        with self._changed:
            while late := [s for s in self._sessions if not s.over and s.asked is None]:
                for session in late:
                    if time.monotonic() - session.since > self._config.timeout_s:
                        problem = session.episode.problem.question[:80]
                        session.over, session.episode.earned = True, 0.0
                        session.error = (
                            f"the agent at {problem!r} did nothing for {self._config.timeout_s:g} s (agent.timeout_s)"
                        )
                        _LOG.warning(session.error)
                if not wait:
                    break
                self._changed.wait(_LOOK_S)
                report_progress()
            asked = {k: s.asked for k, s in enumerate(self._sessions) if s.asked is not None and not s.handed}
            for number in asked:
                self._sessions[number].handed = True
            return Turn(tuple(asked.values()), 1, tuple(asked)) if asked else None

    def take(self, said: Mapping[int, Generated]) -> None:
        with self._changed:
            for number, turn in said.items():
                session = self._sessions[number]
                session.episode.add(turn)
                session.asked, session.handed, session.since = None, False, time.monotonic()
            self._changed.notify_all()

    def finished(self) -> list[Episode]:
        failed = [session.error for session in self._sessions if session.error]
        if len(failed) == len(self._sessions):
            raise ConfigError(f"agent._target_ failed in all of {len(failed)} episodes:\n{failed[0]}\nCorrect it there")
        if failed:
            _LOG.warning(
                "%d of %d agents failed, and earn nothing; the first:\n%s", len(failed), len(self._sessions), failed[0]
            )
        for session in self._sessions:
            if not session.episode.rows:
                about, error = session.episode.problem.question[:80], session.error or "without an error"
                raise ConfigError(
                    f"agent._target_ made no request about {about!r} ({error}): let it ask the model at base_url"
                )
        return [session.episode for session in self._sessions]

    def close(self) -> None:
        """Ends the server; agents that still wait get an error."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024
    episodes: AgentEpisodes


class _Handler(BaseHTTPRequestHandler):
    """The part of OpenAI's protocol that chats need."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path.endswith("/v1/models"):
            self._send(200, {"object": "list", "data": [{"id": _NAME, "object": "model", "owned_by": "rlinf"}]})
        else:
            self._refuse(404, f"{self.path} is not served: ask /v1/models or /v1/chat/completions")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        number, _, rest = self.path.strip("/").partition("/")
        if rest != "v1/chat/completions" or not number.isdigit():
            self._refuse(404, f"{self.path} is not served: ask <base_url>/chat/completions")
            return
        try:
            request = json.loads(body)
            if request.get("stream") or request.get("n", 1) != 1 or request.get("tools"):
                raise ValueError("stream, n > 1 and tools are not served: ask for one whole reply")
            text, reason, prompted, written = cast(_Server, self.server).episodes.reply(int(number), request)
        except (LookupError, TypeError, AttributeError, ValueError, ConfigError) as error:
            missing = isinstance(error, KeyError) or not isinstance(error, LookupError)
            self._refuse(400 if missing else 409, str(error))
            return
        message = {"role": "assistant", "content": text}
        usage = {"prompt_tokens": prompted, "completion_tokens": written, "total_tokens": prompted + written}
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
        found = {"id": f"chatcmpl-{number}", "object": "chat.completion", "created": int(time.time()), "model": _NAME}
        self._send(200, found | {"choices": [choice], "usage": usage})

    def _refuse(self, status: int, message: str) -> None:
        self._send(
            status, {"error": {"message": message, "type": "invalid_request_error", "code": None, "param": None}}
        )

    def _send(self, status: int, content: Mapping[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


def _message(message: Mapping[str, Any]) -> ChatMessage:
    """Returns a message with its content as one text; OpenAI's form also has a list of parts."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content)
    return {"role": str(message["role"]), "content": content}
