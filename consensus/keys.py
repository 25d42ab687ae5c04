"""Where each record stands in the coordination store: the names below ``/<cluster>/``.

Pure; imports nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Keys"]


@dataclass(frozen=True)
class Keys:
    """The keys of one cluster."""

    cluster: str

    @property
    def root(self) -> str:
        """The prefix of all of them."""
        return f"/{self.cluster}/"

    @property
    def config(self) -> str:
        """What is fixed when the cluster is created."""
        return f"{self.root}config"

    @property
    def routing(self) -> str:
        """The routing table."""
        return f"{self.root}routing"

    @property
    def controller(self) -> str:
        """The election key."""
        return f"{self.root}controller"

    @property
    def status(self) -> str:
        """How the cluster does."""
        return f"{self.root}pserver_cluster_status"

    @property
    def members(self) -> str:
        """The prefix of the nodes that are registered."""
        return f"{self.root}pservers/"

    @property
    def reports(self) -> str:
        """The prefix of what masters report."""
        return f"{self.root}reports/"

    @property
    def deaths(self) -> str:
        """The prefix of the processes that are known to be gone."""
        return f"{self.root}gone/"

    @property
    def tables(self) -> str:
        """The prefix of the tables."""
        return f"{self.root}tables/"

    @property
    def shards(self) -> str:
        """The prefix of the readable view of the routing table."""
        return f"{self.root}pshards/"

    @property
    def events(self) -> str:
        """The prefix of what the controller decided."""
        return f"{self.root}events/"

    def member(self, node_id: str) -> str:
        """Return the key of a node's registration."""
        return f"{self.members}{node_id}"

    def incarnation(self, node_id: str) -> str:
        """Return the key that counts how often a node has registered."""
        return f"{self.root}incarnations/{node_id}"

    def report(self, instance: int) -> str:
        """Return the key of a process's report."""
        return f"{self.reports}{instance}"

    def death(self, instance: int) -> str:
        """Return the key that says that a process is gone."""
        return f"{self.deaths}{instance}"

    def table(self, name: str) -> str:
        """Return the key of a table."""
        return f"{self.tables}{name}"

    def shard(self, slot: int, node_id: str) -> str:
        """Return the key of one replica in the readable view."""
        return f"{self.shards}{slot}/{node_id}"

    def event(self, routing_version: int, number: int) -> str:
        """Return the key of an event; the order of the keys is the order of the events."""
        return f"{self.events}{routing_version * 1000 + number:019d}"
