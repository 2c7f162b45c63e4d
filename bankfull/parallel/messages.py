"""What rank 0 sends to the other ranks: their task, and then each step's plan, masks and end. Frames of msgpack."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import msgspec
import numpy as np
import torch

from bankfull.config import RunConfig, SchedConfig, StateConfig
from bankfull.errors import RankLost
from bankfull.parallel.groups import Bounds
from bankfull.parallel.meeting import Meeting
from bankfull.runtime.results import Extra
from bankfull.runtime.rows import Job
from bankfull.sample.params import SamplingParams
from bankfull.types import StepPlan, StepResult, Tier

HEADER = struct.Struct("!Q")
LOOPBACK = "127.0.0.1"
LARGEST = 1 << 30
"""Bytes of a message; a longer one is no message of ours."""
UNREAD = ("structured", "reference", "stop", "bad_words")
"""Sampling parameters that the runner does not read: grammars come as masks, drafts with the plan, words as ids."""
USUAL = SamplingParams()


class HelloMessage(msgspec.Struct, tag="hello"):
    """A follower's first message."""

    version: str
    node: str
    """The name of its machine."""


class RankTask(msgspec.Struct, tag="task"):
    """Rank 0's answer."""

    rank: int
    model: str
    run: RunConfig
    sched: SchedConfig
    state: StateConfig
    max_len: int | None
    meeting: Meeting
    bounds: Bounds
    apart: bool
    """Whether ranks are on other machines, each with its own copy of the weights."""


class RankReady(msgspec.Struct, tag="ready"):
    """A follower is ready to run steps, or says in one sentence why it cannot."""

    problem: str = ""
    refused: bool = False
    """Whether the problem is the user's input."""
    weights: str = ""
    """The fingerprint of the weights, where ranks are apart."""


class JobWire(msgspec.Struct):
    params: dict[str, Any]
    seed: int
    stop_ids: list[int]
    pool: str | None


class PlanMessage(msgspec.Struct, tag="plan"):
    plan: StepPlan
    """The payload of a sequence that enters is its `JobWire`."""


class MasksMessage(msgspec.Struct, tag="masks"):
    """The grammar masks of the newest planned step: row -> numbers and shape."""

    masks: dict[int, tuple[bytes, tuple[int, ...]]]


class SettleMessage(msgspec.Struct, tag="settle"):
    """Rank 0 has waited for its oldest step in flight; so do the others."""

    tokens: list[list[int]] = []
    """Tokens of each work of the step, for stages before the last one."""


class ReplicateMessage(msgspec.Struct, tag="replicate"):
    """Hold copies of the experts that were used most, before the next step."""


class ReplicatedMessage(msgspec.Struct, tag="replicated"):
    """A follower has its copies."""


class EraseMessage(msgspec.Struct, tag="erase"):
    """Clear what is kept beyond the end of the process."""


class MovedMessage(msgspec.Struct, tag="moved"):
    """Transfers between tiers that have ended on a follower."""

    completed: list[int]
    failed: list[int]
    rates: list[tuple[Tier, Tier, float]]
    """All that it has measured so far."""


class OutcomeMessage(msgspec.Struct, tag="outcome"):
    """A step's result, from the last stage."""

    step: int
    tokens: list[list[int]]
    extras: list[Extra | None]
    errors: dict[int, str]
    completed: list[int]


ToFollower = RankTask | PlanMessage | MasksMessage | SettleMessage | ReplicateMessage | EraseMessage
ToLeader = HelloMessage | RankReady | OutcomeMessage | ReplicatedMessage | MovedMessage
_ENCODER = msgspec.msgpack.Encoder(enc_hook=lambda pooled: pooled.double().tolist())
_TO_FOLLOWER = msgspec.msgpack.Decoder(ToFollower)
_TO_LEADER = msgspec.msgpack.Decoder(ToLeader, dec_hook=lambda kind, pooled: torch.tensor(pooled))


def plan_message(plan: StepPlan) -> PlanMessage:
    enter = [one._replace(request=0, payload=_job(one.payload)) for one in plan.enter]
    return PlanMessage(replace(plan, enter=enter))


def _job(job: Job) -> JobWire:
    given = {field.name: getattr(job.params, field.name) for field in fields(SamplingParams)}
    params = {
        name: list(value.items()) if isinstance(value, Mapping) else value
        for name, value in given.items()
        if name not in UNREAD and value != getattr(USUAL, name)
    }
    return JobWire(params, job.seed, sorted(job.stop_ids), job.pool)


def step_plan(message: PlanMessage, allowed: Any) -> StepPlan:
    """The plan as a follower's runner gets it. `allowed`: `SamplingTable.allowed_mask`."""
    enter = []
    for one in message.plan.enter:
        wire, wanted = _read_job(one.payload)
        job = Job(wanted, wire.seed, frozenset(wire.stop_ids), wire.pool, allowed(wanted))
        enter.append(one._replace(payload=job))
    return replace(message.plan, enter=enter)


def _read_job(payload: Any) -> tuple[JobWire, SamplingParams]:
    with refusing_malformed("job"):
        wire = msgspec.convert(payload, JobWire)
        if wire.params.get("logit_bias") is not None:
            wire.params["logit_bias"] = dict(wire.params["logit_bias"])
        return wire, SamplingParams(**wire.params)


@contextmanager
def refusing_malformed(what: str) -> Iterator[None]:
    """Raises RankLost for a part of a message that its decoder leaves as it is."""
    try:
        yield
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise RankLost(f"rank 0 sent what is no {what} ({error}).") from error


def outcome_message(result: StepResult) -> OutcomeMessage:
    return OutcomeMessage(result.step, result.tokens, result.extras, result.errors, result.completed)


def step_result(message: OutcomeMessage) -> StepResult:
    return StepResult(message.step, message.tokens, message.extras, message.errors, message.completed)


def masks_message(masks: Mapping[int, Any]) -> MasksMessage:
    packed = {}
    for row, mask in masks.items():
        array = np.asarray(mask, np.int32)
        packed[row] = (array.tobytes(), array.shape)
    return MasksMessage(packed)


def masks_of(message: MasksMessage) -> dict[int, Any]:
    masks: dict[int, Any] = {}
    with refusing_malformed("mask"):
        for row, (data, shape) in message.masks.items():
            array = np.frombuffer(data, np.int32).reshape(shape)
            masks[row] = array if shape else int(array)
    return masks


class RankConnection:
    """Whole messages over a socket: a private pair on one machine, or a connection between two."""

    def __init__(self, own: socket.socket, name: str = "a rank") -> None:
        """`name`: of the other end, for errors."""
        self._socket, self.name = own, name

    @property
    def host(self) -> str:
        """This end's address, for other connections."""
        return LOOPBACK if self._socket.family == socket.AF_UNIX else str(self._socket.getsockname()[0])

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: ToFollower | ToLeader) -> None:
        self.send_bytes(encoded(message))

    def send_bytes(self, frame: bytes) -> None:
        try:
            self._socket.sendall(frame)
        except OSError as error:
            raise RankLost(f"the connection of {self.name} has ended ({error.strerror or error}).") from error

    def receive(self, decoder: msgspec.msgpack.Decoder[Any], seconds: float | None) -> Any:
        """The next message; None at the end of the connection. `seconds`: the longest wait; None: no limit."""
        self._socket.settimeout(seconds)
        try:
            head = self._read(HEADER.size)
            if head is None:
                return None
            (size,) = HEADER.unpack(head)
            if size > LARGEST:
                raise RankLost(f"{self.name} sent a message that is too long.")
            body = self._read(size)
        except TimeoutError as error:
            raise RankLost(f"{self.name} did not answer within {seconds:g} s.") from error
        except OSError as error:
            raise RankLost(f"the connection of {self.name} has ended ({error.strerror or error}).") from error
        try:
            return None if body is None else decoder.decode(body)
        except msgspec.DecodeError as error:
            raise RankLost(f"{self.name} sent what is no message ({error}).") from error

    def _read(self, size: int) -> bytes | None:
        parts, missing = [], size
        while missing:
            part = self._socket.recv(min(missing, 1 << 20))
            if not part:
                return None
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def from_leader(self, seconds: float | None = None) -> ToFollower | None:
        message: ToFollower | None = self.receive(_TO_FOLLOWER, seconds)
        return message

    def from_follower(self, seconds: float) -> ToLeader | None:
        message: ToLeader | None = self.receive(_TO_LEADER, seconds)
        return message

    def close(self) -> None:
        self._socket.close()


def encoded(message: ToFollower | ToLeader) -> bytes:
    body = _ENCODER.encode(message)
    return HEADER.pack(len(body)) + body
