"""Which cluster a run gets: this machine, or the nodes of the Ray cluster that it is part of."""

from __future__ import annotations

from dataclasses import replace

from rlinf_embodied.cluster.hardware import Cluster, cluster_at_hand
from rlinf_embodied.cluster.nodes import cluster_of
from rlinf_embodied.config import ClusterConfig


def find_cluster(config: ClusterConfig) -> Cluster:
    """Returns the cluster that a run gets.

    Raises:
        ConfigError: an emulated cluster was asked for, more devices than there are, or a Ray cluster that is not there
            or whose nodes differ.
    """
    if config.address is None:
        return cluster_at_hand(config)
    # ray takes half a second to import: only where it is used
    from rlinf_embodied.runtime.ray_nodes import ray_nodes

    return cluster_of(ray_nodes(config.address, config.first_progress_s), config)


def find_remaining(config: ClusterConfig) -> Cluster:
    """Returns what is left of a cluster after a node was lost: no more devices than the run was given.

    Raises:
        ConfigError: this node is not part of a cluster any more.
    """
    left = find_cluster(replace(config, num_devices=None))
    asked = config.num_devices
    return find_cluster(config) if asked is not None and asked < left.num_devices else left
