"""Agents: programs that query the model through an OpenAI client and know nothing of training.

    agent (a thread per episode) --POST /<episode>/v1/chat/completions--> server --turn--> generation
                                 <--------------- reply ------------------------- tokens --

`agent._target_` names a function `(problem, base_url) -> str | float`.  It makes any number of requests, for example
with `openai.OpenAI(base_url=base_url, api_key="-")`, and returns a text, which is scored by the reward stage, or a
number, which is the reward.  A request is a turn: its messages become tokens as in episodes.py, so that the sampled
tokens are trained on unchanged.  The model answers once all episodes of a block have sent a request or ended, so that
results depend on the agents' requests only.  With episodes.free the model answers each request as it arrives.

Sampling follows the section `generation`.  A request may limit its tokens further (`max_tokens`,
`max_completion_tokens`); another `temperature` or `top_p` is refused, since training assumes those of the run.  Other
settings have no effect.
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
from rlinf_embodied.reasoning.batch import Prompt, PromptedProblem
from rlinf_embodied.reasoning.engine import Generated
from rlinf_embodied.reasoning.episodes import Episode, Episodes
from rlinf_embodied.telemetry.progress import report_progress

_LOG = logging.getLogger(__name__)
Agent = Callable[[Problem, str], str | float]
_NAME = "policy"  # of the model
_POLL_S = 1.0  # between two checks of agent.timeout_s


def agent_of(config: AgentConfig) -> Agent | None:
    """Returns the function that agent._target_ names, or None; raises a ConfigError if it cannot be called."""
    target = config._target_
    return None if target is None else cast(Agent, load_plug_in(target, "agent._target_", "problem", "base_url"))


class AgentEpisodes(Episodes):
    """Episodes in which agents send the model's prompts, as requests to a server."""

    def __init__(
        self,
        problems: Sequence[PromptedProblem],
        group_size: int,
        config: MathConfig,
        codec: PromptCodec,
        max_row_tokens: int | None,
    ) -> None:
        """Starts a server and the agents; `max_row_tokens` limits a row, its prompt included."""
        agent = agent_of(config.agent)
        assert agent is not None
        limits = config.generation.max_new_tokens, max_row_tokens
        super().__init__([Episode(p, g, codec, *limits, each_turn=True) for p in problems for g in range(group_size)])
        self._config, self._sampling = config.agent, config.generation
        self._changed = threading.Condition()  # guards what follows, and the episodes
        self._closed = False
        self._pending: dict[int, Prompt] = {}  # of requests that the model has not answered, by episode number
        self._submitted = set[int]()  # numbers of those that `turn` has returned
        self._since = [time.monotonic()] * len(self.episodes)  # since when each agent is at work
        self._errors: dict[int, str] = {}
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.episodes = self
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        for number in range(len(self.episodes)):
            threading.Thread(target=self._run, args=(agent, number), daemon=True).start()

    # ------------------------------------------------------------------------------- called by threads of agents
    def _run(self, agent: Agent, number: int) -> None:
        episode, url = self.episodes[number], f"http://127.0.0.1:{self._server.server_port}/{number}/v1"
        text, reward, error = None, None, ""
        try:
            result = agent(episode.problem, url)
            text, reward = (result, None) if isinstance(result, str) else (None, float(result))
            if reward is not None and not math.isfinite(reward):
                raise ValueError(f"it returned {result!r}, but a reward is a finite number")
        except Exception:  # noqa: BLE001 - the user's code
            error = traceback.format_exc()
        with self._changed:
            if error:
                self._fail(number, error)
            elif not episode.over:
                episode.over, episode.agent_reward = True, reward
                episode.text = episode.text if text is None else text
            self._changed.notify_all()

    def _fail(self, number: int, error: str) -> None:
        """Ends an episode, if it has not ended, without a reward."""
        episode = self.episodes[number]
        if not episode.over:
            episode.over, episode.agent_reward, self._errors[number] = True, 0.0, error

    def reply(self, number: int, request: Mapping[str, Any]) -> tuple[str, str, int, int]:
        """Waits for the model's turn; returns text, finish reason, and numbers of tokens of prompt and turn.

        Raises:
            LookupError: the episode does not exist, or has ended.
            ValueError: the request is not supported, or there is no room for the turn.
            ConfigError: the tokenizer or its template refuses the messages.
        """
        chat, max_tokens = [_message(message) for message in request["messages"]], self._max_tokens(request)
        with self._changed:
            episode = self.episodes[number]
            if episode.over or number in self._pending:
                raise LookupError("the episode has ended, or waits for the reply to another request")
            if episode.turns >= self._config.max_requests:
                raise ValueError(f"agent.max_requests is {self._config.max_requests}, and as many were answered")
            prompt = episode.next_prompt(chat)
            if prompt is None:
                raise ValueError(
                    "there is no room for these messages and a reply: context_length_exceeded (the model's "
                    "context, or algorithm.tokens_per_microbatch)"
                )
            if max_tokens is not None:
                prompt = replace(prompt, room=min(max_tokens, prompt.room or max_tokens))
            self._pending[number] = prompt
            self._changed.notify_all()
            self._changed.wait_for(lambda: number not in self._pending or self._closed)
            if self._closed:
                raise LookupError("the episode was abandoned")
            row, prompt_tokens = episode.rows[-1], len(prompt.tokens)
            new_tokens = len(row.prompt) + len(row.tokens) - prompt_tokens
            return episode.text, "stop" if row.ended else "length", prompt_tokens, new_tokens

    def _max_tokens(self, request: Mapping[str, Any]) -> int | None:
        """Returns the limit that a request sets, or None, after checking its sampling."""
        for name in ("temperature", "top_p"):
            value, run_value = request.get(name), getattr(self._sampling, name)
            if value is not None and value != run_value:
                raise ValueError(
                    f"{name} is {value}, but all tokens are sampled with generation.{name}={run_value}, which training "
                    f"assumes: leave it out of the request, or set generation.{name}={value}"
                )
        limits = (request.get(name) for name in ("max_completion_tokens", "max_tokens"))
        limit = next((limit for limit in limits if limit is not None), None)
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise ValueError(f"max_tokens is {limit!r}, but a reply has at least one token: use 1 or more")
        return limit

    # --------------------------------------------------------------------------- called by the thread that generates
    @property
    def over(self) -> bool:
        with self._changed:
            return not self._pending and super().over

    def turn(self, wait: bool = True) -> dict[int, Prompt]:
        """Returns the prompts of new requests; with `wait` once every agent has sent a request or ended."""
        with self._changed:
            while working := [k for k, e in enumerate(self.episodes) if not e.over and k not in self._pending]:
                for number in working:
                    if time.monotonic() - self._since[number] > self._config.timeout_s:
                        question, limit_s = self.episodes[number].problem.question[:80], self._config.timeout_s
                        error = f"the agent for {question!r} did nothing for {limit_s:g} s (agent.timeout_s)"
                        self._fail(number, error)
                        _LOG.warning(error)
                if not wait:
                    break
                self._changed.wait(_POLL_S)
                report_progress()
            prompts = {k: prompt for k, prompt in sorted(self._pending.items()) if k not in self._submitted}
            self._submitted |= prompts.keys()
            return prompts

    def take(self, rows: Mapping[int, Generated]) -> None:
        with self._changed:
            for number, generated in rows.items():
                self.episodes[number].add(generated)
                del self._pending[number]
                self._submitted.remove(number)
                self._since[number] = time.monotonic()
            self._changed.notify_all()

    def finished(self) -> list[Episode]:
        errors, number = [self._errors[k] for k in sorted(self._errors)], len(self.episodes)
        if len(errors) == number:
            raise ConfigError(f"agent._target_ failed in all of {number} episodes:\n{errors[0]}\nCorrect the agent")
        if errors:
            _LOG.warning("%d of %d agents failed, and earn nothing; the first:\n%s", len(errors), number, errors[0])
        for k, episode in enumerate(self.episodes):
            if not episode.rows:
                question, error = episode.problem.question[:80], self._errors.get(k, "without an error")
                raise ConfigError(
                    f"agent._target_ made no request for {question!r} ({error}): let it query the model at base_url"
                )
        return self.episodes

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
    """The part of OpenAI's protocol that chat completions need."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path.endswith("/v1/models"):
            self._send(200, {"object": "list", "data": [{"id": _NAME, "object": "model", "owned_by": "rlinf"}]})
        else:
            self._refuse(404, f"{self.path} is not served: use /v1/models or /v1/chat/completions")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        number, _, rest = self.path.strip("/").partition("/")
        if rest != "v1/chat/completions" or not number.isdigit():
            self._refuse(404, f"{self.path} is not served: use <base_url>/chat/completions")
            return
        try:
            request = json.loads(body)
            if request.get("stream") or request.get("n", 1) != 1 or request.get("tools"):
                raise ValueError("stream, n > 1 and tools are not supported: request one whole reply")
            text, reason, prompt_tokens, new_tokens = cast(_Server, self.server).episodes.reply(int(number), request)
        except (LookupError, TypeError, AttributeError, ValueError, ConfigError) as error:
            is_bad_request = isinstance(error, KeyError) or not isinstance(error, LookupError)
            self._refuse(400 if is_bad_request else 409, str(error))
            return
        message = {"role": "assistant", "content": text}
        total = prompt_tokens + new_tokens
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": new_tokens, "total_tokens": total}
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
        header = {"id": f"chatcmpl-{number}", "object": "chat.completion", "created": int(time.time()), "model": _NAME}
        self._send(200, header | {"choices": [choice], "usage": usage})

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
