"""The order of a rolling update, and what is left when a step of it fails."""

from __future__ import annotations

import asyncio

import pytest

from bankfull.cluster.rolling_update import FOREVER, RollingUpdate
from bankfull.errors import ConfigError, ModelError


class NotedReplicas:
    """Notes the calls of an update. `room`: replicas that fit beside the old ones; `bad`: loads that fail."""

    def __init__(self, room: int, bad: tuple[int, ...] = ()) -> None:
        self.room, self.bad = room, bad
        self.calls: list[str] = []
        self.loads = self.placed = 0
        self.adopted: tuple[str, int] | None = None

    async def place(self, seconds: float) -> str:
        if not self.room:
            raise ConfigError("There is no room.")
        self.room -= 1
        self.placed += 1
        return f"new-{self.placed}"

    async def load_weights(self, name: str, model: str, generation: int) -> None:
        self.loads += 1
        self.calls.append(f"load {name} {model} {generation}")
        if self.loads in self.bad:
            raise ModelError(f"{name} cannot serve {model}.")

    async def empty(self, name: str, grace: float) -> None:
        self.calls.append(f"empty {name} {grace:g}")

    async def discard(self, name: str) -> None:
        self.room += 1
        self.calls.append(f"discard {name}")

    def adopt(self, model: str, generation: int) -> None:
        self.adopted = model, generation


def updated(replicas: NotedReplicas, count: int, last_grace: float | None = None, why: str = "") -> RollingUpdate:
    names = [f"old-{i + 1}" for i in range(count)]
    update = RollingUpdate(replicas, names, ("A", 4), "B", grace=30.0, last_grace=last_grace, check=lambda model: why)
    asyncio.run(update.run())
    return update


def test_with_room_the_new_replica_is_ready_before_the_old_one_ends() -> None:
    replicas = NotedReplicas(room=1)
    update = updated(replicas, 2)
    assert replicas.calls == [
        "load new-1 B 5",
        "empty old-1 30",
        "discard old-1",
        "load new-2 B 5",
        f"empty old-2 {FOREVER:g}",
        "discard old-2",
    ]
    assert (update.state, update.updated, replicas.adopted) == ("done", 2, ("B", 5))
    assert update.lines[-1] == "All 2 replicas serve B."


def test_without_room_one_is_drained_and_filled_again() -> None:
    replicas = NotedReplicas(room=0)
    update = updated(replicas, 2, last_grace=5.0)
    assert replicas.calls == ["empty old-1 30", "load old-1 B 5", "empty old-2 5", "load old-2 B 5"]
    assert update.state == "done" and "drained first" in update.lines[0]


def test_the_only_replica_is_not_ended_before_another_one_runs() -> None:
    replicas = NotedReplicas(room=0)
    update = updated(replicas, 1)
    assert replicas.calls == [] and update.state == "failed"
    assert "no room for two" in update.lines[-1] and "Nothing was changed" in update.lines[-1]
    assert updated(NotedReplicas(room=1), 1).state == "done"


@pytest.mark.parametrize("room", [1, 0])
def test_weights_that_do_not_load_change_nothing(room: int) -> None:
    replicas = NotedReplicas(room, bad=(1,))
    update = updated(replicas, 3)
    if room:
        assert replicas.calls == ["load new-1 B 5", "discard new-1"]
    else:
        assert replicas.calls == ["empty old-1 30", "load old-1 B 5", "load old-1 A 4"], "the old weights are back"
    assert update.state == "failed" and replicas.adopted is None and "Nothing was changed" in update.lines[-1]


def test_a_later_failure_says_how_far_it_came() -> None:
    update = updated(replicas := NotedReplicas(1, bad=(2,)), 3)
    assert update.state == "failed" and replicas.adopted == ("B", 5)
    assert "1 of 3 replicas have the new weights" in update.lines[-1]


def test_a_model_that_does_not_fit_is_refused_before_anything_is_touched() -> None:
    replicas = NotedReplicas(room=1)
    update = updated(replicas, 2, why="B has another vocabulary than A.")
    assert replicas.calls == [] and update.lines == [
        "B has another vocabulary than A. Nothing was changed: the replicas go on with the weights that they have."
    ]


def test_a_cancelled_update_says_so() -> None:
    async def stopped() -> RollingUpdate:
        replicas = NotedReplicas(room=1)

        async def never(name: str, model: str, generation: int) -> None:
            await asyncio.Event().wait()

        replicas.load_weights = never  # type: ignore[method-assign]
        update = RollingUpdate(replicas, ["old-1"], ("A", 0), "B", grace=1.0)
        task = asyncio.ensure_future(update.run())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert replicas.calls == ["discard new-1"]
        return update

    update = asyncio.run(stopped())
    assert update.state == "failed" and "The update was stopped." in update.lines[-1]
