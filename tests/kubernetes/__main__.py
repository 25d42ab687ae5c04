"""A Kubernetes cluster by hand: ``python -m tests.kubernetes up 2``, ``down`` and parts of it.

The tests refuse to run beside a cluster that was made by hand.
"""

from __future__ import annotations

import argparse
import sys

from tests.kubernetes.backstay_image import backstay_image
from tests.kubernetes.build import CannotRun, build
from tests.kubernetes.cluster import Cluster, ClusterError, the_only_one

LOCK_LIMIT_S = 10.0


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.kubernetes", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start the cluster")
    up.add_argument("nodes", type=int, nargs="?", default=2)
    commands.add_parser("down", help="stop it and remove every trace, also after a crash")
    for name, text in (
        ("node", "start another node, or one that was killed"),
        ("kill-kubelet", "kill a node's kubelet; its containers go on"),
    ):
        commands.add_parser(name, help=text).add_argument("number", type=int)
    commands.add_parser("kill-api-server", help="kill the API server")
    commands.add_parser("api-server", help="start the API server that was killed")
    arguments = parser.parse_args()
    try:
        run(Cluster(build()), arguments)
    except (CannotRun, ClusterError) as error:
        sys.exit(str(error))


def run(cluster: Cluster, arguments: argparse.Namespace) -> None:
    """Do one command with the cluster."""
    with the_only_one(LOCK_LIMIT_S):
        if arguments.command == "up":
            if cluster.exists:
                raise ClusterError("There is a cluster: python -m tests.kubernetes down")
            cluster.up(arguments.nodes, [backstay_image()])
            cluster.note_made_by_hand()
            kubectl = cluster.kubectl[0]
            sys.stdout.write(f"export KUBECONFIG={cluster.kubeconfig}; alias kubectl={kubectl}\n")
        elif arguments.command == "down":
            cluster.down()
        elif arguments.command == "node":
            cluster.start_node(arguments.number, [backstay_image()])
        elif arguments.command == "kill-kubelet":
            cluster.kill_kubelet(arguments.number)
        elif arguments.command == "kill-api-server":
            cluster.kill_api_server()
        else:
            cluster.start_api_server()


if __name__ == "__main__":
    main()
