"""What runs in vLLM's own processes: functions that LLM.apply_model calls there with the model.

They are sent as pickles, so this module is imported there: it needs torch and nothing else.
"""

from __future__ import annotations

import os
import select
import threading
from functools import partial
from typing import Any, cast

import torch
from torch import nn


def model_dtype(model: nn.Module) -> str:
    """Returns what the model computes in, for example "float32"."""
    return str(next(p.dtype for p in model.parameters() if p.is_floating_point())).removeprefix("torch.")


@torch.no_grad()
def process_tied(model: nn.Module) -> list[str]:
    """Recomputes what vLLM derived from weights that an earlier module owns; returns the modules' names.

    vLLM's reload_weights processes shared weights for the first of their modules only: a tied lm_head would keep
    a packed copy of the old embeddings.
    """
    owner: dict[int, str] = {}
    tied = []
    for name, module in model.named_modules():
        own = [id(parameter) for parameter in module.parameters(recurse=False)]
        if any(owner.setdefault(key, name) != name for key in own) and hasattr(module, "quant_method"):
            cast(Any, module).quant_method.process_weights_after_loading(module)
            tied.append(name)
    return tied


def end_with(owner: int, model: nn.Module) -> int:
    """Has this process end when `owner` does, also when that is killed; returns this process's id.

    Nothing happens where they are one, or where the system cannot tell the end of a process (Linux can).
    """
    if owner != os.getpid() and hasattr(os, "pidfd_open"):
        end_after = partial(_end_after, os.pidfd_open(owner))
        threading.Thread(target=end_after, daemon=True, name="end with the owner").start()
    return os.getpid()


def _end_after(owner: int) -> None:
    gone = select.poll()
    gone.register(owner, select.POLLIN)
    gone.poll()
    os._exit(1)
