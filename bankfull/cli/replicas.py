"""Options of `bankfull serve` for several engines: replicas here or on a Ray cluster, or prefill and decode apart."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bankfull.choices import SEPARATE
from bankfull.declared import Trait
from bankfull.errors import ConfigError

if TYPE_CHECKING:
    from bankfull.config import RunConfig, StateConfig
    from bankfull.fleet.attainment import SloMeter
    from bankfull.fleet.replica_range import ReplicaRange
    from bankfull.serve.replicas.local import SetFactory


NOTHING_TO_ENCRYPT = (
    "--link-tls is for engines that are reached over TCP, and these are processes of this machine without it: leave it "
    "out, or give --replicas with --ray, or --separate with --ray or link=socket."
)
RAY_HERE = "local"
"""Instead of an address: start a Ray cluster of this machine alone."""


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    replicas: Annotated[
        str | None,
        typer.Option(
            metavar="N|N..M",
            help="Number of engines behind the API: processes of this machine, which share its cores and memory. With "
            "--ray they are placed by Ray, and a range grows and shrinks with the queue and --slo.",
            show_default="one engine",
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

    link_tls: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="TLS between this server and engines on other machines, and between engines: a folder with tls.crt, "
            "tls.key and ca.crt, at the same place on every machine.",
            show_default="not encrypted",
        ),
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
        tls = self._link_tls(run, ray)
        if self.separate is not None:
            factory = self._separate(self.separate, model, run.device, ray, tls)
            told = {Trait.PREFIX_CACHE: state.prefix_cache, Trait.DIFFUSION: bool(run.diffusion), **run.mesh.traits}
            SEPARATE.refuse("--separate", told, layout=run.mesh)  # the engines judge the model
            return factory
        if self.replicas is None:
            others = {"--ray": ray, "--replica-cpus": self.replica_cpus, "--replica-gpus": self.replica_gpus}
            for name, value in others.items():
                if value is not None:
                    raise ConfigError(f"{name} needs --replicas, the number of engines behind the API.")
            return None
        self._check_shares()
        from bankfull.fleet.replica_range import MOST_REPLICAS, ReplicaRange

        wanted, ray = ReplicaRange.parse(self.replicas), ray or os.environ.get("RAY_ADDRESS") or None
        if ray is None:
            return self._local(wanted, model, run, grace)
        from bankfull.cluster.cluster_replicas import ClusterOptions, cluster_replicas
        from bankfull.cluster.ray_version import installed_version

        ray = None if ray == RAY_HERE else ray
        options = ClusterOptions(
            replicas=wanted,
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
            tls=tls,
        )
        installed_version()
        return cluster_replicas(options)

    def _local(self, wanted: ReplicaRange, model: str, run: RunConfig, grace: float) -> SetFactory:
        from bankfull.cluster.local_replicas import ASK_FOR_RAY, local_replicas

        for name, value in (("--replica-cpus", self.replica_cpus), ("--replica-gpus", self.replica_gpus)):
            if value is not None:
                raise ConfigError(
                    f"{name} is what Ray reserves for a replica, and without it replicas share this machine's cores "
                    f"evenly, or have --threads each: leave {name} out, or {ASK_FOR_RAY}."
                )
        if run.mesh.ranks > 1:
            raise ConfigError(
                f"Replicas of {run.mesh.ranks} ranks each (--parallel) need Ray to place them: {ASK_FOR_RAY}."
            )
        return local_replicas(wanted, self.routing, model=model, grace=grace)

    def memory(self, given: object, device: str, ray: str | None) -> object:
        """The option `memory` of each engine."""
        if given is not None or self.replicas is None or ray or os.environ.get("RAY_ADDRESS"):
            return given
        from bankfull.cluster.local_replicas import memory_of

        return memory_of(int(self.replicas), device)  # `factory` has read it

    def _link_tls(self, run: RunConfig, ray: str | None) -> str:
        """The folder, if its files can be used here; empty: without TLS."""
        if self.link_tls is None:
            return ""
        if self.separate is not None:
            from bankfull.serve.replicas.local import Separation

            over_tcp = bool(ray) or Separation.parse(self.separate).link == "socket"
        else:
            over_tcp = self.replicas is not None and bool(ray or os.environ.get("RAY_ADDRESS"))
        if not over_tcp:
            raise ConfigError(NOTHING_TO_ENCRYPT)
        if run.mesh.ranks > 1:
            raise ConfigError(
                f"--link-tls does not reach what the ranks of a layout send each other, and {run.mesh} has several: "
                "leave out --link-tls and use an encrypted network, or leave out --parallel."
            )
        from bankfull.handshake.link_tls import LinkTls

        folder = self.link_tls.absolute()
        LinkTls(folder).answering()
        return str(folder)

    def _check_shares(self) -> None:
        for name, value in (("--replica-cpus", self.replica_cpus), ("--replica-gpus", self.replica_gpus)):
            if value is not None and not 0 <= value < 100_000:
                raise ConfigError(f"{name} {value:g} is no number of processors; give 0 or more.")
        if self.replica_cpus == 0:
            raise ConfigError("--replica-cpus 0 leaves a replica no processor; give a positive number, such as 0.5.")

    def _separate(self, wanted: str, model: str, device: str, ray: str | None, tls: str) -> SetFactory:
        from bankfull.serve.replicas.local import Separation, local_separate

        pools = Separation.parse(wanted)
        if self.replicas is not None:
            raise ConfigError("--separate says how many engines there are: leave --replicas out, or --separate.")
        if ray == RAY_HERE:
            raise ConfigError("--separate on one machine needs no Ray: leave out --ray local.")
        if ray is None:
            for name, value in (("--replica-cpus", self.replica_cpus), ("--replica-gpus", self.replica_gpus)):
                if value is not None:
                    raise ConfigError(
                        f"--separate without --ray runs engines on this machine, which share its cores: leave {name} "
                        "out, or give --ray."
                    )
            return local_separate(pools, self.routing, tls)
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
            tls=tls,
        )
        factory = cluster_pools(options)
        installed_version()
        return factory
