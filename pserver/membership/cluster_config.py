"""The ``config`` record: made by the first node of a cluster, checked by every other.

It keeps a node out of a cluster that it does not fit, and a cluster out of a store that holds
something else under its name.
"""

from __future__ import annotations

import secrets
from dataclasses import replace

from backstay.config import ServerConfig
from backstay.consensus.records import ClusterConfig
from backstay.consensus.records.keys import Keys
from backstay.consensus.records.settings import ClusterSettings, SettingsRecord
from backstay.consensus.store import CoordinationStore, Get, Put, Txn, absent
from backstay.errors import ConfigError, InvalidRequest

__all__ = ["check_fits", "join_or_create"]

UID_BYTES = 16


async def join_or_create(
    store: CoordinationStore, keys: Keys, wanted: ServerConfig
) -> ClusterConfig:
    """Return the cluster's config, after making it if there is none.

    Raises:
        ConfigError: This node does not fit the cluster, or the store holds something else there.
        StoreError: The store does not answer, or refuses.
    """
    found = await store.get(keys.config)
    if found is None:
        strangers = [
            item.key
            for item in (await store.range("")).items
            if item.key != keys.config and not item.key.startswith(keys.members)
        ]
        made = ClusterConfig(
            cluster=wanted.cluster,
            slot_count=wanted.slot_count,
            replicas=wanted.replicas_wanted,
            initial_nodes=wanted.initial_nodes_wanted,
            cluster_uid=secrets.token_hex(UID_BYTES),
        )
        settings: tuple[Put, ...] = ()
        first = _first_settings(wanted)
        if first != SettingsRecord(ClusterSettings()):
            settings = (Put(keys.settings, first.to_json()),)
        result = await store.transaction(
            Txn(
                (absent(keys.config),),
                success=() if strangers else (Put(keys.config, made.to_json()), *settings),
                failure=(Get(keys.config),),
            )
        )
        if result.succeeded and not strangers:
            return made
        if result.succeeded:
            raise ConfigError(
                f"cluster: the store holds {keys.root + strangers[0]!r} but no config record under "
                f"{keys.root!r}: something else is kept there, or it has lost data. Choose "
                "another name for the cluster, or remove these keys"
            )
        found = result.results[0]
    if found is None:
        raise ConfigError("cluster: the config record is made and removed at the same time")
    try:
        config = ClusterConfig.from_json(found.value)
    except InvalidRequest as error:
        raise ConfigError(
            f"cluster: the store holds a record {keys.root + keys.config!r} that this version "
            f"cannot read ({error}): it belongs to something else or to another version"
        ) from error
    check_fits(config, wanted)
    return config


def _first_settings(wanted: ServerConfig) -> SettingsRecord:
    """Return the settings that a cluster which this node creates begins with."""
    settings = ClusterSettings(
        checkpoint_url=wanted.checkpoint_url or "",
        checkpoint_every_s=wanted.checkpoint_every_s_wanted,
    )
    # What a new cluster begins with is asked once, and is no setting of the cluster.
    decided = wanted.from_profile.keys() - {"restore"}
    if wanted.restores_lost_slots:
        settings = replace(settings, on_slot_loss="restore")
        decided |= {"on_slot_loss"}
    return SettingsRecord(settings, dict.fromkeys(decided, f"profile {wanted.profile}"))


def check_fits(config: ClusterConfig, wanted: ServerConfig) -> None:
    """Refuse a node whose settings differ from the cluster's.

    Raises:
        ConfigError: The message names the setting, and both values.
    """
    pairs: tuple[tuple[str, object, object], ...] = (
        ("cluster", config.cluster, wanted.cluster),
        ("slot_count", config.slot_count, wanted.slot_count),
        ("replicas", config.replicas, wanted.replicas),
        ("initial_nodes", config.initial_nodes, wanted.initial_nodes),
    )
    for name, theirs, ours in pairs:
        # None is "whatever the cluster has".
        if ours is not None and theirs != ours:
            raise ConfigError(
                f"{name}: {ours!r} here, but the store holds another cluster under the same "
                f"root {f'/{config.cluster}/'!r}, with {theirs!r}; start this node with the "
                "cluster's settings, or give its cluster another name"
            )
