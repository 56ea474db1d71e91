"""Files from node to node over Ray: a process per node reads and writes; the driver lists names, and reads no file.

provide   the driver's node -> nodes of workers     what a stage reads: policy folders, checkpoints, data sets
collect   nodes of workers  -> the driver's node    what a stage writes: checkpoints, videos
keep      values that a node's store holds, so that they outlive another node: snapshots

A path means the same on every node: what is sent lies at the same place there.  A file appears under its name when it
is complete; one that is there already, with the same size and time, is not sent again (so a shared file system costs
a listing and nothing else).
"""

from __future__ import annotations

import dataclasses
import os
import stat
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import ray
from numpy.typing import NDArray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError
from ray.experimental import get_object_locations

from rlinf_embodied.errors import DataError, LostWorkerError, RlinfError
from rlinf_embodied.runtime.ray_cluster import here, on_node, task_variables

_Result = TypeVar("_Result")
_MOST_BYTES = 32 << 30  # more is a data set, which a node is better given once and for all
_UNDER_WAY = 8  # portions
PORTION_BYTES = 64 << 20  # of a file, in the object store at a time
_INCOMING = ".incoming"
_PATH_NAMES = ("path", "file", "files", "folder", "checkpoint", "data")  # or the end of a name


# ------------------------------------------------------------------------------------------------------ on one node
@dataclass(frozen=True, slots=True)
class Entry:
    """A file below a folder, or the file itself (path "")."""

    path: str
    size: int
    mtime_ns: int
    mode: int


def work_in(folder: str) -> None:
    """Makes the driver's working folder that of this process too: a relative path then means the same in both.

    Raises:
        DataError: this node cannot have a folder of that name.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        os.chdir(folder)
    except OSError as error:
        raise DataError(
            f"node {os.uname().nodename} cannot have the folder {folder} in which the run was started ({error}): start "
            "the run in a folder that every node can make, for example /tmp"
        ) from error


def listing(root: str) -> tuple[Entry, ...]:
    """Returns the files at or below a path, by name; () if there is nothing."""
    path = Path(root)
    files = [path] if path.is_file() else sorted(found for found in path.rglob("*") if found.is_file())
    found = []
    for file in files:
        about = file.stat()
        name = "" if file == path else file.relative_to(path).as_posix()
        found.append(Entry(name, about.st_size, about.st_mtime_ns, stat.S_IMODE(about.st_mode)))
    return tuple(found)


def read(root: str, path: str, offset: int, size: int) -> NDArray[np.uint8]:
    """Returns a portion of a file below `root`."""
    with open(Path(root, path), "rb") as file:
        file.seek(offset)
        return np.frombuffer(file.read(size), np.uint8)


def write(root: str, entry: Entry, offset: int, content: NDArray[np.uint8]) -> None:
    """Writes a portion of a file below `root`; they come in their order, and with the last one the file is there.

    Raises:
        DataError: it cannot be written; names the path and this node.
    """
    target = Path(root, entry.path)
    aside = target.with_name(target.name + _INCOMING)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("r+b" if offset else "wb") as file:
            file.seek(offset)
            file.write(content.data)
        if offset + content.size == entry.size:
            os.utime(aside, ns=(entry.mtime_ns, entry.mtime_ns))
            aside.chmod(entry.mode)
            os.replace(aside, target)
    except OSError as error:
        raise DataError(
            f"node {os.uname().nodename} cannot write {target}, which the run needs there ({error.strerror}): let "
            "the run's user write it, or make it yourself"
        ) from error


def paths_in(config: object) -> list[Path]:
    """Returns the files and folders of this node that a configuration declares, relative ones made absolute.

    Declared are paths, and texts under a name that says that it is a path: `folder`, `checkpoint`, `teacher_folder`.
    Any other text may happen to be the name of something that is nobody else's business, such as a home folder.
    """
    found: dict[Path, None] = {}

    def look(value: object, declared: bool) -> None:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value, declared = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}, False
        if isinstance(value, dict):
            for key, item in value.items():
                look(item, declared or str(key).rpartition("_")[2] in _PATH_NAMES)
        elif isinstance(value, (list, tuple)):
            for item in value:
                look(item, declared)
        elif isinstance(value, Path) or (declared and isinstance(value, str) and value):
            path = Path(value).absolute()
            if os.path.exists(path) and path not in (Path.cwd(), *Path.cwd().parents):
                found[path] = None

    look(config, declared=False)
    return list(found)


# -------------------------------------------------------------------------------------------------------- between nodes
class _Clerk:
    """The Ray actor: executes file requests on its node, in their order."""

    def do(self, function: Callable[..., object], *arguments: object) -> object:
        return function(*arguments)

    def keep(self, refs: list[ray.ObjectRef]) -> None:
        """Holds copies of values in this node's store, which may drop those that nobody holds, until the next call."""
        self._kept = ray.get(refs)


class RayFiles:
    """The files of a session's nodes; nothing runs before a second node has a worker."""

    def __init__(self) -> None:
        self._clerks: dict[str, ActorHandle] = {}  # by node id

    def prepare(self, nodes: Iterable[str], kernels: Path | None) -> None:
        """Gives nodes what a worker needs before anything else: the driver's working folder, and the pinned kernels.

        Raises:
            DataError: a node cannot have it; names the path and the node.
        """
        for node in self._others(nodes):
            self._fetch(node, work_in, os.getcwd())
        if kernels is not None:
            self.provide(kernels, nodes)

    def provide(self, path: Path, nodes: Iterable[str]) -> None:
        """Sends what lies at a path of the driver's node to nodes that do not have it."""
        path = path.absolute()
        for node in self._others(nodes):
            held = self._fetch(node, listing, str(path))
            self._send(path, here(), node, listing(str(path)), held)

    def collect(self, path: Path, nodes: Iterable[str]) -> int:
        """Brings what lies at a path of other nodes to the driver's, as far as that lacks it: so many files."""
        path, number = path.absolute(), 0
        for node in self._others(nodes):
            there = self._fetch(node, listing, str(path))
            number += self._send(path, node, here(), there, listing(str(path)))
        return number

    def keep(self, refs: Sequence[ray.ObjectRef], nodes: Collection[str]) -> None:
        """Has each value held on one node where it was not made, each node in turn; nothing where there is one node."""
        everywhere = sorted({*nodes, here()}) if nodes else []
        known = get_object_locations(list(refs)) if len(everywhere) > 1 else {}
        chosen: dict[str, list[ray.ObjectRef]] = {}
        for number, (ref, value) in enumerate(known.items()):
            others = [node for node in everywhere if node not in value["node_ids"]]
            if value["node_ids"] and others:  # Ray keeps small values with their owner, the driver
                chosen.setdefault(others[number % len(others)], []).append(ref)
        held = [(node, self._clerk(node).keep.remote(chosen.get(node, []))) for node in everywhere if known]
        for node, ref in held:
            try:
                ray.get(ref)
            except RayError as error:
                raise self._lost(node, error) from error

    def close(self) -> None:
        for clerk in self._clerks.values():
            ray.kill(clerk, no_restart=True)
        self._clerks.clear()

    def _others(self, nodes: Iterable[str]) -> list[str]:
        """Returns these nodes without the driver's, each once."""
        every = dict.fromkeys(nodes)
        return [node for node in every if node != here()] if every else []

    def _send(self, path: Path, source: str, target: str, there: Sequence[Entry], held: Sequence[Entry]) -> int:
        """Sends the files that the target lacks, in the order of their times: what seals a folder comes last."""
        missing = sorted(set(there) - set(held), key=lambda entry: (entry.mtime_ns, entry.path))
        size = sum(entry.size for entry in missing)
        if size > _MOST_BYTES:
            raise DataError(
                f"{path} holds {size / 1e9:.0f} GB that node {_address(target)} does not have, too much to be sent at "
                "each start: copy it to the same path there, or put it on a file system that all nodes share"
            )
        under_way: deque[object] = deque()
        for entry in missing:
            for offset in range(0, max(entry.size, 1), PORTION_BYTES):
                data = self._clerk(source).do.remote(read, str(path), entry.path, offset, PORTION_BYTES)
                under_way.append(self._clerk(target).do.remote(write, str(path), entry, offset, data))
                if len(under_way) > _UNDER_WAY:
                    self._get(target, under_way.popleft())
        for answer in under_way:
            self._get(target, answer)
        return len(missing)

    def _fetch(self, node: str, function: Callable[..., _Result], *arguments: object) -> _Result:
        """Runs a function on a node and returns what it gives."""
        return cast(_Result, self._get(node, self._clerk(node).do.remote(function, *arguments)))

    def _get(self, node: str, answer: object) -> object:
        try:
            return ray.get(cast(ray.ObjectRef, answer))
        except RayTaskError as error:
            cause = error.cause
            lost = f"a file on its way to or from node {_address(node)} is lost ({cause}): start the run again"
            raise (cause if isinstance(cause, RlinfError) else DataError(lost)) from None
        except RayError as error:
            raise self._lost(node, error) from error

    def _lost(self, node: str, error: RayError) -> LostWorkerError:
        self._clerks.clear()  # of either node: a new one is started when it is needed
        return LostWorkerError(
            f"node {_address(node)} runs no process that reads or writes files ({str(error).splitlines()[0]}): look at "
            "its logs in /tmp/ray, or take it out of the cluster"
        )

    def _clerk(self, node: str) -> ActorHandle:
        if node not in self._clerks:
            runtime_env = {"env_vars": task_variables()}
            made = ray.remote(_Clerk).options(num_cpus=0, scheduling_strategy=on_node(node), runtime_env=runtime_env)
            self._clerks[node] = cast(ActorHandle, made.remote())
        return self._clerks[node]


def _address(node_id: str) -> str:
    return next((node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id), node_id)
