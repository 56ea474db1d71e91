"""Run by tests/runtime/test_nodes.py: two Ray nodes in one machine, a run of light stages on both; prints JSON."""

from __future__ import annotations

import json

from ray.cluster_utils import Cluster as RayCluster

from rlinf_embodied.config import ClusterConfig
from rlinf_embodied.errors import ConfigError, LostNodeError
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.planning.notation import resolve
from rlinf_embodied.runtime.host import StepContext, WorkerSpec
from rlinf_embodied.runtime.ray_session import RaySession
from rlinf_embodied.runtime.session import find_cluster
from rlinf_embodied.workflow.graph import Edge, StageSpec, WeightEdge, Workflow


def main() -> None:
    nodes = RayCluster(initialize_head=True, head_node_args={"num_cpus": 1})
    second = nodes.add_node(num_cpus=1)
    found: dict[str, object] = {}
    config = ClusterConfig(name="ray", address=nodes.address)
    cluster = find_cluster(config)
    try:
        find_cluster(ClusterConfig(name="ray", address=nodes.address, num_devices=3))
    except ConfigError as error:
        found["too many"] = str(error)
    session = RaySession()
    stages = {
        "reader": StageSpec("reader", "light_fakes.Reader", None),
        "learner": StageSpec("learner", "light_fakes.Learner", 1000),
        "where": StageSpec("where", "light_fakes.Where", None),
    }
    edges = (Edge("reader", "learner"), Edge("learner", "where"))
    flow = Workflow("fake", 2, stages, edges, (WeightEdge("learner", "reader"),), {})
    items = ["reader on 0", "learner on 1", "where on 0-1"]
    executor = Executor(flow, resolve("apart", [{"items": items}], 2, flow), session, cluster)
    found["versions"] = [executor.run(StepContext(k)).reports["reader"][0] for k in range(2)]
    found["planned"] = [cluster.node_id(k) for k in range(2)]
    found["real"] = executor.facts["where"]
    session.close()
    last = RaySession()
    specs = [WorkerSpec(k, "cpu", node=cluster.node_id(k)) for k in range(2)]
    last.start(specs)
    last.clear()  # both are up
    nodes.remove_node(second, allow_graceful=False)
    try:
        last.replace([])
    except LostNodeError as error:
        found["gone"] = error.workers
    found["was there"] = [k for k in range(2) if cluster.node_id(k) == second.node_id]
    found["left"] = find_cluster(config).num_devices
    last.start([spec for spec in specs if spec.node != second.node_id])
    last.clear()
    last.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
