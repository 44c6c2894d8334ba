"""`slipstream certs`: an authority of one's own and one certificate for all services of a run.

    slipstream certs certs --host trainer-1.example --days 30

One certificate for all: a run is one trust domain, and whoever holds its token may call every RPC anyway. The key of
the authority is needed only to make further certificates; keep it away from the services, or delete it.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from slipstream.common.config import ConfigError, TlsConfig, dump_toml
from slipstream.launcher.errors import LauncherError

USAGE = "usage: slipstream certs [DIR] [--host NAME]... [--days N] [--force]"
HELP = f"""\
{USAGE}

Make an authority and one certificate for mutual TLS between all services, and print the [tls] section that names them.

  DIR           where they go; certs unless told
  --host NAME   a host name, such as *.example.org, or an address that peers call a service by, beside localhost; may be
                repeated
  --days N      how long they hold, 1 to 3650; 90 unless told
  --force       write over those that are there
"""
ALWAYS = ("localhost", "127.0.0.1", "::1")
DEFAULT_DAYS = 90
MAX_DAYS = 3650
MAX_HOST_CHARS = 253
_LABEL = "[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
HOST = re.compile(rf"(\*\.)?{_LABEL}(\.{_LABEL})*")
CLOCK_SKEW = datetime.timedelta(hours=1)
"""Valid from a little before now: not every machine's clock is ours."""


class Period(NamedTuple):
    """When a certificate holds."""

    start: datetime.datetime
    end: datetime.datetime


@dataclass(frozen=True)
class CertificateFiles:
    """Where they are in a directory."""

    directory: Path

    @property
    def tls(self) -> TlsConfig:
        """What a configuration says to use them."""
        return TlsConfig(
            cert_file=self.directory / "service.pem",
            key_file=self.directory / "service-key.pem",
            ca_file=self.directory / "ca.pem",
        )

    @property
    def authority_key(self) -> Path:
        return self.directory / "ca-key.pem"

    @property
    def all(self) -> list[Path]:
        authority, service, service_key = (self.directory / n for n in ("ca.pem", "service.pem", "service-key.pem"))
        return [authority, self.authority_key, service, service_key]


def run_certs(arguments: Sequence[str]) -> int:
    """The command; returns the exit code."""
    if any(argument in ("-h", "--help") for argument in arguments):
        print(HELP, end="")
        return 0
    directory, hosts, days, force = _parse(arguments)
    files = make_certificates(directory, hosts, days, force=force)
    names = ", ".join((*ALWAYS, *hosts))
    print(f"# {directory}/: an authority and one certificate for {names}, for {days} days.")
    print(f"# {directory}/ca-key.pem makes further ones: keep it away from the services.")
    same = ", or use examples/tls.toml, which says the same" if directory == Path("certs") else ""
    print(f"# Put this in your TOML file{same}:")
    print("[tls]")
    print(dump_toml(files.tls), end="")
    return 0


def make_certificates(
    directory: Path, hosts: Sequence[str], days: int, *, force: bool = False, now: datetime.datetime | None = None
) -> CertificateFiles:
    """Write all four files, keys readable by their owner alone. Raises `LauncherError` rather than overwrite."""
    now = now or datetime.datetime.now(datetime.UTC)
    period = Period(now - CLOCK_SKEW, now + datetime.timedelta(days=days))
    files = CertificateFiles(directory)
    there = [path for path in files.all if path.exists()]
    if there and not force:
        raise LauncherError(f"{there[0]} exists already; --force makes new ones, which the old ones do not get on with")
    authority_key, service_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = _authority(authority_key, period)
    service = _service(service_key, authority, authority_key, (*ALWAYS, *hosts), period)
    contents = (_pem(authority), _pem(authority_key), _pem(service), _pem(service_key))
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path, content in zip(files.all, contents, strict=True):
            _write(path, content)
    except OSError as error:
        raise LauncherError(f"no certificates can be made in {directory}: {error.strerror}") from None
    return files


def _parse(arguments: Sequence[str]) -> tuple[Path, list[str], int, bool]:
    directory, hosts, days, force = None, [], DEFAULT_DAYS, False
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if argument == "--force":
            force = True
        elif name in ("--host", "--days"):
            value = value if equals else next(rest, "")
            if name == "--host" and _is_host(value):
                hosts.append(value)
            elif name == "--days" and value.isdecimal() and 1 <= int(value) <= MAX_DAYS:
                days = int(value)
            else:
                expected = "a host name or an address" if name == "--host" else f"1 to {MAX_DAYS}"
                raise ConfigError(f"{name} {value!r}: expected {expected}; {USAGE}")
        elif argument.startswith("-") or directory is not None:
            raise ConfigError(f"unexpected argument {argument!r}; {USAGE}")
        else:
            directory = Path(argument)
    return directory or Path("certs"), hosts, days, force


def _is_host(text: str) -> bool:
    """Whether a peer could be called that: an address, or labels of letters, digits and hyphens; `*.` before them."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return len(text) <= MAX_HOST_CHARS and HOST.fullmatch(text) is not None
    return True


def _authority(key: ec.EllipticCurvePrivateKey, period: Period) -> x509.Certificate:
    name = _name("slipstream authority")
    builder = _builder(name, name, key, period)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return builder.add_extension(_usage(signs_certificates=True), critical=True).sign(key, hashes.SHA256())


def _service(
    key: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    hosts: Sequence[str],
    period: Period,
) -> x509.Certificate:
    both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    builder = _builder(_name("slipstream service"), authority.subject, key, period)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(both, critical=False).add_extension(issuer, critical=False)
    alternatives = x509.SubjectAlternativeName([_alternative(host) for host in dict.fromkeys(hosts)])
    return builder.add_extension(alternatives, critical=False).sign(authority_key, hashes.SHA256())


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, period: Period
) -> x509.CertificateBuilder:
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(period.start)
        .not_valid_after(period.end)
        .add_extension(identifier, critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError:
        raise ConfigError(f"--host {host!r} is no host name; {USAGE}") from None


def _pem(item: x509.Certificate | ec.EllipticCurvePrivateKey) -> bytes:
    if isinstance(item, x509.Certificate):
        return item.public_bytes(serialization.Encoding.PEM)
    return item.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, content: bytes) -> None:
    """Into place at once, and never readable by others in between."""
    staged = path.with_name(path.name + ".new")
    staged.unlink(missing_ok=True)
    handle = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if "key" in path.name else 0o644)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    staged.replace(path)
