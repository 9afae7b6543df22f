"""Tests for the files of --ssl-certfile and --ssl-keyfile."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from mindie_mm.errors import InputError
from mindie_mm.settings.config import ServiceConfig
from service.http.certificate import Certificate
from tests.certificates import write_certificate


def handshake(server: ssl.SSLContext, certfile: Path) -> bool:
    """Return whether a client that trusts only `certfile` accepts the certificate of `server`."""
    client = ssl.create_default_context(cafile=str(certfile))
    wires = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(*wires, server_hostname="127.0.0.1"),
        server.wrap_bio(*reversed(wires), server_side=True),
    ]
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLCertVerificationError:
                return False
    return True


def test_a_certificate_and_its_key_may_be_in_one_file(tmp_path: Path) -> None:
    certfile, keyfile = tmp_path / "cert.pem", tmp_path / "key.pem"
    write_certificate(certfile, keyfile)
    both = tmp_path / "both.pem"
    both.write_bytes(certfile.read_bytes() + keyfile.read_bytes())
    given = Certificate.of(ServiceConfig(ssl_certfile=both))
    assert given is not None
    assert handshake(given.context, certfile)
    assert Certificate.of(ServiceConfig()) is None


def test_a_new_certificate_is_used_only_if_its_key_belongs_to_it(tmp_path: Path) -> None:
    certfile, keyfile = tmp_path / "cert.pem", tmp_path / "key.pem"
    write_certificate(certfile, keyfile)
    given = Certificate(certfile, keyfile)
    old = tmp_path / "old.pem"
    old.write_bytes(certfile.read_bytes())
    write_certificate(certfile, tmp_path / "new-key.pem")
    with pytest.raises(InputError, match="KEY_VALUES_MISMATCH; both must be PEM files that belong together"):
        given.reload()
    assert handshake(given.context, old)
    (tmp_path / "new-key.pem").rename(keyfile)
    given.reload()
    assert not handshake(given.context, old)
    assert handshake(given.context, certfile)


def test_files_that_cannot_be_used_are_refused_without_a_question_on_the_terminal(tmp_path: Path) -> None:
    certfile, keyfile = tmp_path / "cert.pem", tmp_path / "key.pem"
    with pytest.raises(InputError, match=f"ssl_certfile {certfile} and ssl_keyfile {keyfile} .*: No such file"):
        Certificate(certfile, keyfile)
    write_certificate(certfile, keyfile, password=b"secret")
    with pytest.raises(InputError, match="has a password, which is not supported"):
        Certificate(certfile, keyfile)
    certfile.write_text("no certificate")
    with pytest.raises(InputError, match="both must be PEM files"):
        Certificate(certfile, keyfile)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ssl_keyfile": "/key.pem"}, "ssl_keyfile is set, but ssl_certfile is not"),
        ({"root_path": "mm"}, "root_path='mm' must begin with a slash and end without one"),
        ({"root_path": "/mm/"}, "root_path='/mm/'"),
    ],
)
def test_incomplete_settings_are_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ServiceConfig(**settings)
