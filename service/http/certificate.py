"""The certificate that the service uses to encrypt connections (TLS)."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import NoReturn

from mindie_mm.errors import InputError
from mindie_mm.settings.config import ServiceConfig
from service.http.watched_files import WatchedFiles

_log = logging.getLogger(__name__)


class Certificate:
    """A TLS context with a certificate that can be replaced while the service runs."""

    def __init__(self, certfile: Path, keyfile: Path | None) -> None:
        """Read the files. Raise InputError if they cannot be used."""
        self._certfile = certfile
        self._keyfile = keyfile
        self.watched = WatchedFiles([certfile, keyfile])
        self.context = self._load()
        """Context for new connections, with TLS 1.2 or later."""

    @classmethod
    def of(cls, config: ServiceConfig) -> Certificate | None:
        """Return the certificate of the settings, or None if connections are not encrypted."""
        return None if config.ssl_certfile is None else cls(config.ssl_certfile, config.ssl_keyfile)

    def reload(self) -> None:
        """Use the present contents of the files for new connections. Raise InputError if they cannot be used."""
        self._load()  # an error while a certificate is replaced would leave a context without a key
        self.context.load_cert_chain(self._certfile, self._keyfile, _no_password)
        _log.info("new connections use the certificate that is now in %s", self._certfile)

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self._certfile, self._keyfile, _no_password)
        except OSError as error:
            files = f"ssl_certfile {self._certfile}" + (f" and ssl_keyfile {self._keyfile}" if self._keyfile else "")
            reason = getattr(error, "reason", None) or error.strerror or "no certificate or key was found"
            raise InputError(
                f"{files} cannot be used: {reason}; both must be PEM files that belong together"
            ) from error
        return context


def _no_password() -> NoReturn:
    """Refuse an encrypted key. Without this function, OpenSSL would ask for its password on the terminal."""
    raise InputError("the key in ssl_keyfile or ssl_certfile has a password, which is not supported; remove it")
