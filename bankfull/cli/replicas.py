"""Options of `bankfull serve` for several engines: replicas on a Ray cluster, or prefill and decode apart."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from bankfull.errors import ConfigError

if TYPE_CHECKING:
    from bankfull.fleet.attainment import SloMeter
    from bankfull.serve.replicas.local import SetFactory


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    replicas: Annotated[
        str | None,
        typer.Option(
            metavar="N|N..M",
            help="Number of engines behind the API, or bounds of autoscaling on the queue and --slo; placed by Ray.",
            show_default="one engine, without Ray",
        ),
    ] = None
    separate: Annotated[
        str | None,
        typer.Option(
            metavar="prefill=N,decode=M",
            help="Engine processes of this machine that compute prompts, and others that decode; exchange=1GiB bounds "
            "the shared memory between them.",
            show_default="every engine does both",
        ),
    ] = None
    routing: Annotated[
        str,
        typer.Option(
            help="With several engines, how one is chosen: prefix (cached prefix and load), completion (earliest end "
            "under --policy), round-robin, least-loaded or random-two."
        ),
    ] = "prefix"
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="With --replicas, the Ray cluster to join.",
            show_default="RAY_ADDRESS; without it, Ray is started on this machine",
        ),
    ] = None
    replica_cpus: Annotated[
        float | None,
        typer.Option(
            help="CPUs of each replica, all ranks together, and its threads.",
            show_default="an even share of the cluster's",
        ),
    ] = None
    replica_gpus: Annotated[
        float | None,
        typer.Option(help="GPUs of each replica.", show_default="1 for each rank if the cluster has GPUs, else 0"),
    ] = None

    def factory(
        self,
        model: str,
        device: str,
        grace: float,
        slo: SloMeter | None = None,
        take_over: bool = False,
        ranks: int = 1,
    ) -> SetFactory | None:
        """Makes the replicas, for `run_server`; None: there is one engine, without Ray. `take_over`: on a shared Ray
        cluster the old server has most of the resources until it ends. `ranks`: of each replica."""
        if self.separate is not None:
            return self._separate(self.separate)
        if self.replicas is None:
            others = {"--ray": self.ray, "--replica-cpus": self.replica_cpus, "--replica-gpus": self.replica_gpus}
            for name, value in others.items():
                if value is not None:
                    raise ConfigError(f"{name} needs --replicas, the number of engines behind the API.")
            return None
        for name, value in (("--replica-cpus", self.replica_cpus), ("--replica-gpus", self.replica_gpus)):
            if value is not None and not 0 <= value < 100_000:
                raise ConfigError(f"{name} {value:g} is no number of processors; give 0 or more.")
        if self.replica_cpus == 0:
            raise ConfigError("--replica-cpus 0 leaves a replica no processor; give a positive number, such as 0.5.")
        from bankfull.cluster.cluster_replicas import ClusterOptions, cluster_replicas
        from bankfull.cluster.ray_version import installed_version
        from bankfull.fleet.replica_range import MOST_REPLICAS, ReplicaRange

        ray = self.ray or os.environ.get("RAY_ADDRESS") or None
        options = ClusterOptions(
            ReplicaRange.parse(self.replicas),
            model,
            self.routing,
            ray,
            self.replica_cpus,
            self.replica_gpus,
            device,
            grace,
            1 if take_over and ray is not None else MOST_REPLICAS,
            ranks,
            slo,
        )
        installed_version()
        return cluster_replicas(options)

    def _separate(self, wanted: str) -> SetFactory:
        from bankfull.serve.replicas.local import Separation, local_separate

        for name, value in (
            ("--replicas", self.replicas),
            ("--ray", self.ray),
            ("--replica-cpus", self.replica_cpus),
            ("--replica-gpus", self.replica_gpus),
        ):
            if value is not None:
                raise ConfigError(
                    f"--separate runs engine processes on this machine, without Ray: leave {name} out, or --separate."
                )
        return local_separate(Separation.parse(wanted), self.routing)
