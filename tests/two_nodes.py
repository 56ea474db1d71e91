"""Trains on two Ray nodes that share nothing but read-only code, on this machine, and compares with one process.

python -m tests.two_nodes                           both workflows, three plans each, and a lost node
python -m tests.two_nodes workflow=embodied plan=disaggregated
python -m tests.two_nodes hold=true                 starts the nodes, prints how to enter them, waits

    namespace rlinf-node-0  10.77.0.1  <-- veth -->  10.77.0.2  namespace rlinf-node-1
    own /tmp, /dev/shm, HOME, host name                own /tmp, /dev/shm, HOME, host name
    ray start --head; the driver                       ray start --address=10.77.0.1:6379

Each node gives Ray one core, so a plan for two devices has a worker on each; the kernel says which process is where.
With plan=lost every process of the second node is killed in the middle, and the run has to go on with the first.
Exit code 1: a digest differs, or a worker is not where the plan has it.  Needs root, ip and unshare; no Ray but these
two is touched.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rlinf_embodied.command_line import main
from rlinf_embodied.compose import chosen
from rlinf_embodied.errors import ConfigError, RlinfError

REPOSITORY = Path(__file__).resolve().parents[1]
CODE = "/srv"  # where the repository lies in both nodes
PORT = 6379
_LOOK_S = 0.5
NAMES = ("rlinf-node-0", "rlinf-node-1")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
LOST = "lost"  # disaggregated, until the second node is killed
PLANS = ("collocated", "disaggregated", "auto", LOST)
SCRIPTS = {"embodied": "train_vla.py", "reasoning": "train_llm_math.py"}
COMMON = ("run.num_iterations=6", "run.seed=3", "checkpoint.every=1", "plan.profile_budget_s=2")
SIZES = {
    "embodied": (
        "env=point_reach env.num_envs=16 env.block_size=4 env.obs_size=16 env.chunk=4 env.horizon=12 "
        "env.chunks_per_rollout=4 policy.options.hidden_size=32 policy.options.num_layers=1 policy.options.num_heads=2 "
        "policy.options.stem_width=16 policy.options.keypoints=4 policy.options.num_bins=9 "
        "policy.options.critic_hidden_size=16 policy.options.instruction_length=4 "
        "algorithm.epochs=2 algorithm.num_minibatches=2 algorithm.value_epochs=2 algorithm.target_kl=null "
        "warm_start.num_demos=32 warm_start.epochs=1 warm_start.head_epochs=4 warm_start.head_batch_size=16 "
        "eval.num_episodes=4 eval.num_envs=4 eval.num_videos=2 eval.video_size=32"
    ),
    "reasoning": (
        "data.level=sum1-2-9 policy.hidden_size=32 policy.num_layers=1 policy.num_heads=2 policy.intermediate_size=64 "
        "policy.context_length=40 generation.max_new_tokens=20 generation.rows_per_block=8 "
        "generation.rows_per_batch=16 generation.max_num_seqs=16 algorithm.prompts_per_iteration=8 "
        "algorithm.group_size=4 algorithm.tokens_per_microbatch=256 warm_start.steps=60 warm_start.num_examples=512 "
        "eval.num_problems=8 "
        "eval.num_samples=2 eval.problems_per_block=4"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    workflow: str = "all"
    plan: str = "all"
    hold: bool = False


@dataclass(slots=True)
class Node:
    """A network namespace and, within it, a process that keeps the mounts."""

    name: str
    holder: subprocess.Popen[bytes]

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Returns a command line that runs in this node."""
        inside = ["--target", str(self.holder.pid), "--net", "--mount", "--uts"]
        return ["nsenter", *inside, "env", "--chdir=/tmp", *_variables(), *arguments]

    def run(self, arguments: Sequence[str], **options: object) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end."""
        return subprocess.run(self.command(arguments), text=True, check=False, **options)  # pyright: ignore[reportCallIssue,reportArgumentType]

    def pids(self) -> list[int]:
        """Returns the processes of this node."""
        answer = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True)
        return [int(pid) for pid in answer.stdout.split()]


def _variables() -> list[str]:
    kept = ("RAY_ADDRESS", "RLINF_EMBODIED_CACHE", "TMPDIR", "RAY_TMPDIR")
    cleared = [word for name in kept for word in ("-u", name)]
    return [
        *cleared,
        "HOME=/tmp/home",
        f"PYTHONPATH={CODE}",
        "RAY_USAGE_STATS_ENABLED=0",
        "OMP_NUM_THREADS=1",
        "RAY_worker_niceness=0",
    ]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def start_nodes() -> list[Node]:
    """Makes both namespaces, joined by a cable, and starts a Ray node in each.

    Raises:
        ConfigError: this machine does not let us.
    """
    try:
        for name in NAMES:
            _ip("netns", "add", name)
        _ip("link", "add", "rlinf0", "netns", NAMES[0], "type", "veth", "peer", "name", "rlinf1", "netns", NAMES[1])
        for k, (name, address) in enumerate(zip(NAMES, ADDRESSES, strict=True)):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", f"rlinf{k}")
            for interface in ("lo", f"rlinf{k}"):
                _ip("-n", name, "link", "set", interface, "up")
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigError(
            f"network namespaces cannot be made here ({error}): run this as root, with iproute2"
        ) from error
    nodes = [Node(name, _hold(name)) for name in NAMES]
    for k, node in enumerate(nodes):
        _start_ray(node, k)
    return nodes


def _hold(name: str) -> subprocess.Popen[bytes]:
    """Starts the process whose mounts are those of a node; nothing that is mounted there is seen outside."""
    known = zip(("127.0.0.1", *ADDRESSES), ("localhost", *NAMES), strict=True)
    hosts = "".join(f"{address} {host}\\n" for address, host in known)
    script = (
        f"hostname {name} && mount --bind {REPOSITORY} {CODE} && mount -o remount,bind,ro {CODE} && "
        "mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs /tmp && mkdir /tmp/home && "
        f"printf '{hosts}' > /tmp/hosts && mount --bind /tmp/hosts /etc/hosts && echo ready && "
        "exec sleep infinity"
    )
    unshare = ["unshare", "--mount", "--uts", "--propagation", "private", "sh", "-c", script]
    holder = subprocess.Popen(["ip", "netns", "exec", name, *unshare], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    if holder.stdout.readline().strip() != b"ready":
        raise ConfigError(f"the mounts of {name} cannot be made: run this as root")
    return holder


def _start_ray(node: Node, index: int) -> None:
    head, joins = ["--head", f"--port={PORT}", "--include-dashboard=false"], [f"--address={ADDRESSES[0]}:{PORT}"]
    place = joins if index else head
    given = ["--num-cpus=1", f"--node-ip-address={ADDRESSES[index]}", "--object-store-memory=268435456"]
    answer = node.run([sys.executable, "-m", "ray.scripts.scripts", "start", *place, *given], capture_output=True)
    if answer.returncode:
        raise RlinfError(f"ray start failed in {node.name}:\n{answer.stdout}{answer.stderr}")


def _kill(name: str, spared: str = "sleep") -> None:
    """Kills what runs in a namespace, but for the command that keeps its mounts."""
    answer = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    for pid in map(int, answer.stdout.split()):
        with suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() != spared:
                os.kill(pid, signal.SIGKILL)


def stop_nodes() -> None:
    """Ends every process in the namespaces and removes them."""
    for name in NAMES:
        _kill(name, spared="")
    for name in NAMES:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@dataclass(slots=True)
class Outcome:
    """What a run left, and where its workers were seen."""

    code: int
    digest: str = ""
    tail: str = ""
    seen: dict[str, set[int]] = field(default_factory=dict)  # pids of workers, by node
    lost_at: str = ""  # the last line before the second node was killed
    recovery: dict[str, object] = field(default_factory=dict)  # as recoveries.jsonl tells


def train(nodes: Sequence[Node], workflow: str, plan: str) -> Outcome:
    """Runs a training on the first node; plan "serial" is the reference, in one process."""
    folder = f"/tmp/runs/{workflow}-{plan}"
    where = ["cluster=serial"] if plan == "serial" else ["cluster=ray", f"plan={plan}"]
    if plan == LOST:
        where[1] = "plan=disaggregated"
    script = f"{CODE}/experiments/{SCRIPTS[workflow]}"
    command = [sys.executable, script, *SIZES[workflow].split(), *COMMON, *where, f"run.dir={folder}"]
    seen: dict[str, set[int]] = {node.name: set() for node in nodes}
    lost_at = ""
    with tempfile.NamedTemporaryFile("w+") as log:
        driver = subprocess.Popen(nodes[0].command(command), stdout=log, stderr=subprocess.STDOUT)
        while driver.poll() is None:
            time.sleep(_LOOK_S)
            for node in nodes:
                seen[node.name] |= {pid for pid in node.pids() if _is_worker(pid)}
            lines = [line for line in Path(log.name).read_text().splitlines() if line.startswith("iteration ")]
            if plan == LOST and lines and not lost_at:
                lost_at = lines[-1].split("  ")[0]
                _kill(nodes[1].name)
        said = Path(log.name).read_text()
    summary = nodes[0].run(["cat", f"{folder}/summary.json"], capture_output=True)
    digest = json.loads(summary.stdout)["weights_sha256"] if summary.returncode == 0 else ""
    told = nodes[0].run(["cat", f"{folder}/recoveries.jsonl"], capture_output=True)
    recovery = json.loads(told.stdout.splitlines()[0]) if told.returncode == 0 else {}
    return Outcome(driver.returncode, digest, said[-3000:], seen, lost_at, recovery)


def _is_worker(pid: int) -> bool:
    """Returns whether a process hosts stages: Ray names actors by their class."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::_Worker")
    except OSError:
        return False


def check(nodes: Sequence[Node], workflow: str, plans: Sequence[str]) -> bool:
    """Trains under every plan and prints a line for each; returns whether all is as it should be."""
    reference, good = "", True
    for plan in ("serial", *plans):
        start = time.time()
        found = train(nodes, workflow, plan)
        reference = reference or found.digest
        workers = {name: len(pids) for name, pids in found.seen.items()}
        fine = found.code == 0 and bool(found.digest) and found.digest == reference
        fine = fine and (plan in ("serial", "auto") or all(workers.values()))
        fine = fine and bool(found.recovery) == (plan == LOST)
        good = good and fine
        print(
            f"{workflow} {plan}: {'ok' if fine else 'FAILED'}, exit {found.code}, weights {found.digest[:12]}, "
            f"workers {found.seen}, {time.time() - start:.0f} s",
            flush=True,
        )
        if plan == LOST:
            print(f"    the second node was killed after {found.lost_at}: {found.recovery}", flush=True)
            _start_ray(nodes[1], 1)
        if not fine:
            print(found.tail, flush=True)
    return good


def run(options: Options) -> int:
    workflows = chosen(options.workflow.removeprefix("all"), SCRIPTS, "workflow")
    plans = list(chosen(options.plan.removeprefix("all"), dict.fromkeys(PLANS), "plan"))
    try:
        nodes = start_nodes()
        if options.hold:
            print("\n".join(" ".join(node.command(["bash"])) for node in nodes), flush=True)
            signal.pause()
        outcomes = [check(nodes, workflow, plans) for workflow in workflows]
        return 0 if all(outcomes) else 1
    except KeyboardInterrupt:
        return 130
    finally:
        stop_nodes()


if __name__ == "__main__":
    main(run, Options)
