"""Which session a run gets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlinf_embodied.config import ClusterConfig
from rlinf_embodied.runtime.session import SerialSession, Session


def make_session(config: ClusterConfig) -> Session:
    """Returns the session that `cluster.session` names."""
    if config.session == "serial":
        return SerialSession()
    # ray takes half a second to import: only where it is used
    from rlinf_embodied.runtime.ray_session import RaySession

    if config.address is not None:
        from rlinf_embodied.runtime.ray_nodes import join

        join(config.address)
    return RaySession(config.object_store_bytes, config.hang_after_s, config.first_progress_s)


@contextmanager
def open_session(config: ClusterConfig) -> Iterator[Session]:
    """Yields the session that `cluster.session` names, and ends its workers behind the block."""
    session = make_session(config)
    try:
        yield session
    finally:
        session.close()
