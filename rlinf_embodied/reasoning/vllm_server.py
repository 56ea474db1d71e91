# pyright: reportMissingImports=false
"""A process that runs vLLM in its own environment, without this project: token ids in, token ids out.

stdin    {"do": "submit", "rows": [[number, prompt, most tokens, seed], ...]}   {"do": "abort", "rows": [number, ...]}
         {"do": "load", "folder": <model folder, or null>, "version": n}   {"do": "pause"}   {"do": "resume"}
stdout   {"ready": <vLLM's version>}   {"loaded": n}
         {"version": n, "rows": [[number, tokens, log-probs, "" or "stop" or "length"], ...]}    after each step

Each message is one line of JSON.  While paused it makes no steps, and rows stay as they are.  After new weights their
keys and values are computed again.  A load without a folder reads new adapters only.  The process ends with its input,
and then removes the folder around its model.  Its argument is JSON, too (VllmEngine).
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
    os.dup2(2, 1)  # printed text goes to the log
    arguments = json.loads(sys.argv[1])
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_read, args=(inbox,), daemon=True).start()

    def reply(**message: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # the owner was killed; the end of the input follows
            print(json.dumps(message), file=replies)

    import vllm
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    sampling = arguments["sampling"]
    sampling["logit_bias"] = {int(token): bias for token, bias in sampling["logit_bias"].items()}
    engine = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**arguments["engine"]))
    version, paused, adapters = arguments["version"], False, None
    if arguments["adapters"] is not None:
        adapters = vllm.lora.request.LoRARequest("adapters", 1, arguments["adapters"])
        engine.add_lora(adapters)
    reply(ready=vllm.__version__)
    while True:
        busy = not paused and engine.has_unfinished_requests()
        while not (busy and inbox.empty()):
            message = inbox.get()
            if message is None:
                return shutil.rmtree(os.path.dirname(arguments["engine"]["model"]), ignore_errors=True)
            if message["do"] == "submit":
                for row, prompt, max_tokens, seed in message["rows"]:
                    limits = {"max_tokens": max_tokens, "seed": seed, "detokenize": False}
                    params = SamplingParams(**sampling, **limits, logprobs=0, output_kind=RequestOutputKind.DELTA)
                    engine.add_request(str(row), {"prompt_token_ids": prompt}, params, lora_request=adapters)
            elif message["do"] == "abort":
                engine.abort_request([str(row) for row in message["rows"]])
            elif message["do"] == "load":
                _load(engine, message["folder"], adapters)
                version = message["version"]
                reply(loaded=version)
            else:
                paused = message["do"] == "pause"
            busy = not paused and engine.has_unfinished_requests()
        rows = [_row(output) for output in engine.step()]
        reply(version=version, rows=rows)


def _read(inbox: queue.SimpleQueue) -> None:
    for line in sys.stdin:
        if line.endswith("\n"):  # the last line of a killed owner may be incomplete
            inbox.put(json.loads(line))
    inbox.put(None)


def _row(output: Any) -> list[object]:
    (completion,) = output.outputs
    tokens = list(completion.token_ids)
    log_probs = [entry[token].logprob for token, entry in zip(tokens, completion.logprobs or (), strict=True)]
    return [int(output.request_id), tokens, log_probs, completion.finish_reason or ""]


def _load(engine: Any, folder: str | None, adapters: Any) -> None:
    if folder is not None:
        engine.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        engine.apply_model(_pack_head)
    if adapters is not None:
        engine.remove_lora(adapters.lora_int_id)  # otherwise vLLM keeps them
        engine.add_lora(adapters)
    engine.reset_prefix_cache(reset_running_requests=True)


def _pack_head(model: Any) -> None:
    """Packs a head again that is tied to the embeddings: on CPUs vLLM 0.32 keeps the old one."""
    head: Any = getattr(model, "lm_head", None)
    if hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)


if __name__ == "__main__":
    main()
