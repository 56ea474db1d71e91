# pyright: reportMissingImports=false
"""vLLM as a process with its own environment, which has nothing of this project: token ids in, token ids out.

stdin    {"do": "submit", "rows": [[number, prompt, most tokens, seed], ...]}   {"do": "abort", "rows": [number, ...]}
         {"do": "load", "folder": <model folder>, "version": n}   {"do": "pause"}   {"do": "resume"}
stdout   {"ready": <vLLM's version>}   {"loaded": n}
         {"version": n, "rows": [[number, tokens, log-probs, "" or "stop" or "length"], ...]}    after each step

A line of JSON each; it ends with its input, and removes the folder around its model then.  Paused, it makes no steps:
rows stay where they are.  With new weights their keys and values are computed again.  The argument is JSON, too: see
VllmEngine.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import sys
import threading
from typing import Any


def main() -> None:
    """Serves until the end of the input."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever prints goes to the log
    given = json.loads(sys.argv[1])
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_read, args=(inbox,), daemon=True).start()

    def reply(**message: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # the owner was killed, and the end of the input follows
            print(json.dumps(message), file=replies)

    import vllm
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    sampling = given["sampling"]
    sampling["logit_bias"] = {int(token): bias for token, bias in sampling["logit_bias"].items()}
    engine = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**given["engine"]))
    version, paused = given["version"], False
    reply(ready=vllm.__version__)
    while True:
        busy = not paused and engine.has_unfinished_requests()
        while not (busy and inbox.empty()):
            asked = inbox.get()
            if asked is None:
                return shutil.rmtree(os.path.dirname(given["engine"]["model"]), ignore_errors=True)
            if asked["do"] == "submit":
                for row, prompt, most, seed in asked["rows"]:
                    kind, own = RequestOutputKind.DELTA, {"max_tokens": most, "seed": seed, "detokenize": False}
                    params = SamplingParams(**sampling, **own, logprobs=0, output_kind=kind)
                    engine.add_request(str(row), {"prompt_token_ids": prompt}, params)
            elif asked["do"] == "abort":
                engine.abort_request([str(row) for row in asked["rows"]])
            elif asked["do"] == "load":
                _load(engine, asked["folder"])
                version = asked["version"]
                reply(loaded=version)
            else:
                paused = asked["do"] == "pause"
            busy = not paused and engine.has_unfinished_requests()
        rows = [_row(output) for output in engine.step()]
        reply(version=version, rows=rows)


def _read(inbox: queue.SimpleQueue) -> None:
    for line in sys.stdin:
        if line.endswith("\n"):  # the last one of an owner that was killed may not be whole
            inbox.put(json.loads(line))
    inbox.put(None)


def _row(output: Any) -> list[object]:
    (made,) = output.outputs
    tokens = list(made.token_ids)
    found = [of[token].logprob for token, of in zip(tokens, made.logprobs or (), strict=True)]
    return [int(output.request_id), tokens, found, made.finish_reason or ""]


def _load(engine: Any, folder: str) -> None:
    engine.collective_rpc("reload_weights", kwargs={"weights_path": folder})
    engine.apply_model(_pack_head)
    engine.reset_prefix_cache(reset_running_requests=True)


def _pack_head(model: Any) -> None:
    """Packs a head anew that is tied to the embeddings: on CPUs vLLM 0.32 leaves it as it was."""
    head: Any = getattr(model, "lm_head", None)
    if hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)


if __name__ == "__main__":
    main()
