"""Where replicas run and what they do, for `bankfull cluster status`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bankfull.cluster.messages import ReplicaPlaced
from bankfull.serve.replicas.view import ReplicaView


def shown_replicas(placed: Mapping[str, ReplicaPlaced], views: Iterable[ReplicaView]) -> list[dict[str, Any]]:
    """One object for each replica that Ray has placed; one without an engine is starting."""
    by_name = {view.name: view for view in views}
    return [
        {
            "name": name,
            "state": view.state if (view := by_name.get(name)) else "starting",
            "node": where.node,
            "address": f"{where.host}:{where.port}",
            "running": view.load.running if view and view.load is not None else 0,
            "waiting": view.load.waiting if view and view.load is not None else 0,
            "rows": view.rows if view else 0,
            "hit_rate": view.hit_rate if view else None,
            "weights": view.weights if view else "",
            "restarts": (view.restarts if view else 0) + where.restarts,
        }
        for name, where in placed.items()
    ]
