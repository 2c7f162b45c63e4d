"""TLS: certificates that may be replaced while the server runs."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

from bankfull.errors import ConfigError

log = logging.getLogger("bankfull.serve")

Stamp = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True, slots=True)
class Tls:
    certificate: Path | None = None
    key: Path | None = None
    password: str | None = None
    client_authorities: Path | None = None
    """Whoever connects must show a certificate that one of these has signed."""

    @property
    def files(self) -> list[Path]:
        return [file for file in (self.certificate, self.key, self.client_authorities) if file is not None]

    def context(self) -> ssl.SSLContext:
        """Of the files as they are now."""
        assert self.certificate is not None, "certificates_of comes first"
        for file in self.files:
            if not file.is_file():
                raise ConfigError(f"The TLS file {file} does not exist.")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # Without a password of ours OpenSSL would ask for one at the terminal, in the middle of everything.
            context.load_cert_chain(self.certificate, self.key, lambda: self.password or "")
            if self.client_authorities is not None:
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(self.client_authorities)
        except (OSError, ValueError) as error:  # ssl's errors among them
            raise ConfigError(f"The TLS certificate {self.certificate} cannot be used: {error}.") from None
        return context


class Certificates:
    """What new connections are shown. Files that change are read again; what cannot be used changes nothing: a key and
    its certificate are two files, and one of them is replaced first."""

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        self._seen = self._stamp()
        self.context = tls.context()

    def look(self, *, final: bool = False) -> None:
        """Whether a file has changed. `final`: read them in any case."""
        stamp = self._stamp()
        if stamp == self._seen and not final:
            return
        self._seen = stamp
        try:
            self.context = self._tls.context()
        except ConfigError as problem:
            log.error("the TLS certificate stays as it was: %s", problem)
        else:
            log.info("the TLS certificate was read again: %s", self._tls.certificate)

    def _stamp(self) -> Stamp:
        return tuple(_stamp(file) for file in self._tls.files)


def certificates_of(tls: Tls) -> Certificates | None:
    """None where there is no TLS."""
    if tls.certificate is None:
        if tls.files:
            raise ConfigError("--tls-key and --tls-client-ca need --tls-certificate.")
        return None
    return Certificates(tls)


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
