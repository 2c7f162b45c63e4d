"""Options of `bankfull serve` for several engines: replicas on a Ray cluster, or prefill and decode apart."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from bankfull.errors import ConfigError

if TYPE_CHECKING:
    from bankfull.config import RunConfig, StateConfig
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
            help="Engines that compute prompts, and others that decode: processes of this machine, or with --ray on "
            "others. exchange=1GiB bounds the memory between them, link=socket sends state over TCP instead of shared "
            "memory.",
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
        run: RunConfig,
        state: StateConfig,
        ray: str | None,
        grace: float,
        slo: SloMeter | None = None,
        take_over: bool = False,
    ) -> SetFactory | None:
        """Makes the replicas, for `run_server`; None: there is one engine, without Ray. `run`, `state`: of each engine.
        `ray`: the Ray cluster to join. `take_over`: there the old server has most of the resources until it ends."""
        if self.separate is not None:
            from bankfull.serve.engine.exchange_end import refuse_separate

            factory = self._separate(self.separate, model, run.device, ray)
            refuse_separate(run.mesh, state.prefix_cache, run.diffusion)
            return factory
        if self.replicas is None:
            others = {"--ray": ray, "--replica-cpus": self.replica_cpus, "--replica-gpus": self.replica_gpus}
            for name, value in others.items():
                if value is not None:
                    raise ConfigError(f"{name} needs --replicas, the number of engines behind the API.")
            return None
        self._check_shares()
        from bankfull.cluster.cluster_replicas import ClusterOptions, cluster_replicas
        from bankfull.cluster.ray_version import installed_version
        from bankfull.fleet.replica_range import MOST_REPLICAS, ReplicaRange

        ray = ray or os.environ.get("RAY_ADDRESS") or None
        options = ClusterOptions(
            replicas=ReplicaRange.parse(self.replicas),
            model=model,
            routing=self.routing,
            ray=ray,
            cpus=self.replica_cpus,
            gpus=self.replica_gpus,
            device=run.device,
            grace=grace,
            first=1 if take_over and ray is not None else MOST_REPLICAS,
            ranks=run.mesh.ranks,
            slo=slo,
        )
        installed_version()
        return cluster_replicas(options)

    def _check_shares(self) -> None:
        for name, value in (("--replica-cpus", self.replica_cpus), ("--replica-gpus", self.replica_gpus)):
            if value is not None and not 0 <= value < 100_000:
                raise ConfigError(f"{name} {value:g} is no number of processors; give 0 or more.")
        if self.replica_cpus == 0:
            raise ConfigError("--replica-cpus 0 leaves a replica no processor; give a positive number, such as 0.5.")

    def _separate(self, wanted: str, model: str, device: str, ray: str | None) -> SetFactory:
        from bankfull.serve.replicas.local import Separation, local_separate

        pools = Separation.parse(wanted)
        if self.replicas is not None:
            raise ConfigError("--separate says how many engines there are: leave --replicas out, or --separate.")
        if ray is None:
            for name, value in (("--replica-cpus", self.replica_cpus), ("--replica-gpus", self.replica_gpus)):
                if value is not None:
                    raise ConfigError(
                        f"--separate without --ray runs engines on this machine, which share its cores: leave {name} "
                        "out, or give --ray."
                    )
            return local_separate(pools, self.routing)
        self._check_shares()
        from bankfull.cluster.cluster_pools import PoolOptions, cluster_pools
        from bankfull.cluster.ray_version import installed_version

        options = PoolOptions(
            pools=pools,
            model=model,
            routing=self.routing,
            ray=ray,
            cpus=self.replica_cpus,
            gpus=self.replica_gpus,
            device=device,
        )
        made = cluster_pools(options)
        installed_version()
        return made
