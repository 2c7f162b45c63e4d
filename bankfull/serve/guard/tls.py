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
    """Certificate authorities; every client must present a certificate that one of them has signed."""

    @property
    def files(self) -> list[Path]:
        return [file for file in (self.certificate, self.key, self.client_authorities) if file is not None]

    def context(self) -> ssl.SSLContext:
        """An SSL context with the current contents of the files."""
        assert self.certificate is not None, "call certificates_of first"
        for file in self.files:
            if not file.is_file():
                raise ConfigError(f"The TLS file {file} does not exist.")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # Without a password callback OpenSSL would prompt at the terminal.
            context.load_cert_chain(self.certificate, self.key, lambda: self.password or "")
            if self.client_authorities is not None:
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(self.client_authorities)
        except (OSError, ValueError) as error:  # includes ssl.SSLError
            raise ConfigError(f"The TLS certificate {self.certificate} cannot be used: {error}.") from None
        return context


class Certificates:
    """The certificates of new connections. Changed files are reloaded; invalid ones change nothing, because key and
    certificate are two files and are replaced one after the other."""

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        self._seen = self._stamp()
        self.context = tls.context()

    def reload(self, *, force: bool = False) -> None:
        """Reload the files if one has changed, or in any case with `force`."""
        stamp = self._stamp()
        if stamp == self._seen and not force:
            return
        self._seen = stamp
        try:
            self.context = self._tls.context()
        except ConfigError as problem:
            log.error("keeping the previous TLS certificate: %s", problem)
        else:
            log.info("reloaded the TLS certificate: %s", self._tls.certificate)

    def _stamp(self) -> Stamp:
        return tuple(_stamp(file) for file in self._tls.files)


def certificates_of(tls: Tls) -> Certificates | None:
    """The certificates, or None without TLS."""
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
