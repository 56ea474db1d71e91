"""Starts Ray for a process that has none, or joins a cluster."""

from __future__ import annotations

import logging
import os
from typing import Any, cast

import ray

from rlinf_embodied.cluster.hardware import store_bytes
from rlinf_embodied.runtime.stop_signals import kept_from_others
from rlinf_embodied.runtime.worker_process import prepare_driver

_LOG = logging.getLogger(__name__)
_START_ATTEMPTS = 3
_SLOW_START = "timed out during startup"


def start_ray(object_store_bytes: int | None = None) -> str | None:
    """Starts Ray in this process, quietly, and returns its folder; or joins the cluster that RAY_ADDRESS names."""
    prepare_driver()
    if os.environ.get("RAY_ADDRESS"):
        with kept_from_others():
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    for attempt in range(_START_ATTEMPTS):
        try:
            with kept_from_others():
                started = ray.init(
                    address="local",  # never one that somebody started here, or that a killed run left a note of
                    num_cpus=max(cores, 8),  # Ray's CPUs are book-keeping here: workers are placed by the plan
                    include_dashboard=False,
                    object_store_memory=object_store_bytes or store_bytes(),
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    configure_logging=True,
                )
            return str(cast(Any, started).address_info["session_dir"])
        except Exception as error:  # Ray has no class for it
            ray.shutdown()
            if _SLOW_START not in str(error) or attempt + 1 == _START_ATTEMPTS:
                raise
            _LOG.warning("Ray did not start within its 30 s, as it happens on busy machines: trying again")
