"""Options of `bankfull serve` for authentication, network access and logging."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from bankfull.serve.guard.layers import Protection


@dataclass(frozen=True, slots=True)
class ProtectionOptions:
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File of lines printed by `bankfull key`. BANKFULL_API_KEY may hold keys, too.", show_default=False
        ),
    ] = None
    no_auth: Annotated[
        bool, typer.Option("--no-auth", help="Accept requests without a key, also from other machines.")
    ] = False
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Host name of this server; may be given several times.", show_default="this machine's"),
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin of web pages that may call the API, such as https://app.example.org.", show_default="none"
        ),
    ] = None
    share_prefix_cache: Annotated[
        bool,
        typer.Option(
            "--share-prefix-cache",
            help="Share the prefix cache between keys: faster, but timing reveals what other keys sent.",
        ),
    ] = False
    max_connections: Annotated[
        int, typer.Option(help="Most connections; beyond them, an idle one is closed for a new one.")
    ] = 8192
    connections_per_address: Annotated[
        int | None,
        typer.Option(
            help="Most connections per client address; 0: no limit (behind a proxy).",
            show_default="a quarter of --max-connections",
        ),
    ] = None
    tls_certificate: Annotated[
        Path | None, typer.Option(help="TLS certificate; reloaded when the file changes.", show_default=False)
    ] = None
    tls_key: Annotated[Path | None, typer.Option(help="Private key of the certificate.", show_default=False)] = None
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            help="CA certificates; only clients with a certificate signed by them may connect.", show_default=False
        ),
    ] = None
    log_json: Annotated[bool, typer.Option("--log-json", help="Write logs as JSON.")] = False
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write prompts into the log.")] = False
    vllm_metrics: Annotated[bool, typer.Option("--vllm-metrics", help="Also export metrics under vLLM's names.")] = (
        False
    )

    def protection(self, host: str) -> Protection:
        from bankfull.serve.guard.checks import access_policy
        from bankfull.serve.guard.connections import ConnectionLimits
        from bankfull.serve.guard.keys import Keyring, keys_of_environment
        from bankfull.serve.guard.layers import Protection
        from bankfull.serve.guard.tls import Tls

        # Removed from the environment: the engine process needs no keys.
        keyring = Keyring(keys_of_environment(os.environ), self.api_key_file)
        os.environ.pop("BANKFULL_API_KEY", None)
        access = access_policy(
            keyring,
            host=host,
            no_auth=self.no_auth,
            hosts=self.allowed_host or (),
            origins=self.cors_origin or (),
            share_prefixes=self.share_prefix_cache,
        )
        return Protection(
            access=access,
            tls=Tls(self.tls_certificate, self.tls_key, client_authorities=self.tls_client_ca),
            connections=ConnectionLimits(connections=self.max_connections, per_address=self.connections_per_address),
            log_json=self.log_json,
            log_prompts=self.log_prompts,
            vllm_metrics=self.vllm_metrics,
        )
