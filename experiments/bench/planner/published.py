"""The published workloads that frozen profiles describe, and the clusters they ran on."""

from dataclasses import replace

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.compose import CONFIG_DIR
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.profile import Profile, load_profile, workflow_for
from rlinf_embodied.tools.plans import find_cluster


def h100(num_devices: int) -> Cluster:
    """Returns as many nodes of eight H100s as it takes, each as configs/cluster describes it."""
    one = find_cluster("h100x8")
    (node,) = one.groups
    num_nodes = num_devices // node.num_devices
    return replace(
        one,
        name=f"h100x{num_devices}",
        num_devices=num_devices,
        num_cores=num_nodes * one.num_cores,
        description=f"{num_nodes} nodes x {node.devices_per_node} {node.kind}",
        groups=(replace(node, num_nodes=num_nodes),),
    )


def frozen(name: str) -> Profile:
    """Returns a profile of configs/profiles."""
    return load_profile(CONFIG_DIR / "profiles" / f"{name}.json")


def pricer_of(profile: Profile, cluster: Cluster) -> Pricer:
    """Returns the prices of a profile's workflow on a cluster."""
    return Pricer(workflow_for(profile), profile, cluster)
