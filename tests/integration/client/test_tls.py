"""Mutual TLS: the client shows the run's certificate, and a stranger without one gets no answer."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from slipstream.api.run.v1 import run_pb2, run_pb2_grpc
from slipstream.common.config import TlsConfig
from slipstream.common.runtime import Service
from slipstream_client import AsyncClient, Tls, Unauthenticated, Unreachable


class Runs(run_pb2_grpc.RunServiceServicer):
    """Knows one run."""

    async def GetRun(self, request: run_pb2.GetRunRequest, context: grpc.aio.ServicerContext) -> run_pb2.GetRunResponse:
        return run_pb2.GetRunResponse(run=run_pb2.Run(run_id="safe", state=run_pb2.RUN_STATE_RUNNING))


def self_signed(directory: Path) -> Tls:
    """A certificate that is its own authority, for 127.0.0.1."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    directory.mkdir()
    tls = Tls(directory / "cert.pem", directory / "key.pem", directory / "cert.pem")
    Path(tls.cert_file).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    Path(tls.key_file).write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return tls


async def test_only_a_client_with_certificate_and_token_gets_in(make_config, tmp_path):
    own, strange = self_signed(tmp_path / "own"), self_signed(tmp_path / "strange")
    tls = TlsConfig(cert_file=Path(own.cert_file), key_file=Path(own.key_file), ca_file=Path(own.ca_file))
    added = run_pb2_grpc.add_RunServiceServicer_to_server
    service = Service(make_config(token="secret", tls=tls), [(added, Runs(), "slipstream.api.run.v1.RunService")])
    await service.start()
    address = f"127.0.0.1:{service.port}"
    try:
        async with AsyncClient.connect(address, token="secret", tls=own) as client:
            assert (await client.get_run()).run_id == "safe"
        async with AsyncClient.connect(address, token="other", tls=own) as client:
            with pytest.raises(Unauthenticated, match="token is wrong"):
                await client.get_run()
        for certificate in (strange, None):
            async with AsyncClient.connect(address, token="secret", tls=certificate, timeout_s=2.0) as client:
                with pytest.raises(Unreachable, match=f"{address} cannot be reached: "):
                    await client.get_run()
    finally:
        await service.stop()
