"""A Ray cluster of several nodes on this host, for tests: `ray_nodes.py NUM_NODES NUM_CPUS NUM_GPUS`.

It prints its address and lives until its stdin closes. The GPUs are only numbers. Needs
RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0, without which Ray would not stay on loopback.
"""

import sys

from ray.cluster_utils import Cluster

if __name__ == "__main__":
    num_nodes, num_cpus, num_gpus = map(int, sys.argv[1:])
    cluster = Cluster()
    for _ in range(num_nodes):
        cluster.add_node(
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            node_ip_address="127.0.0.1",
            include_dashboard=False,
            include_log_monitor=False,
            no_monitor=True,
        )
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()
