"""Two machines with one core each, as far as Ray can tell: its address is printed, a line kills the second of them.

A process of its own, which is gone with all of its own when its input ends.
"""

from __future__ import annotations

import os
import sys

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
second = cluster.add_node(num_cpus=1)
print(cluster.address, flush=True)
if sys.stdin.readline():
    cluster.remove_node(second, allow_graceful=False)
    print("killed", flush=True)
    sys.stdin.readline()
cluster.shutdown()
