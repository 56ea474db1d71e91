"""Run by tests/runtime/test_nodes.py: a training on two Ray nodes, one of which is lost; prints JSON."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster as RayCluster
from runs import tiny, train


def main(folder: Path) -> None:
    nodes = RayCluster(initialize_head=True, head_node_args={"num_cpus": 1})
    second = nodes.add_node(num_cpus=1)

    def lose() -> None:
        while not (folder / "metrics.jsonl").exists():  # after the first iteration
            time.sleep(0.05)
        nodes.remove_node(second, allow_graceful=False)

    threading.Thread(target=lose, daemon=True).start()
    on_both = ["cluster=ray", f"cluster.address={nodes.address}", "plan=disaggregated"]
    summary = train(tiny(f"run.dir={folder}", "run.num_iterations=12", "run.exact=exact", *on_both))
    alone = train(tiny(f"run.dir={folder}-alone", "run.num_iterations=12", "run.exact=exact"))
    ray.shutdown()  # before its head node: a driver that is still connected would be ended with it
    nodes.shutdown()
    print(json.dumps({"lost": summary["weights_sha256"], "alone": alone["weights_sha256"]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
