"""Certificates and node keys for a deployment on one's own machine, to try things out.

The authority signs one server certificate and is then forgotten: its private key is never written,
so nobody can sign with it later. For real servers take certificates of an authority of your own
(docs/deployment.md).
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedshuffle._arrays import count
from fedshuffle._files import replace
from fedshuffle.errors import FedShuffleError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

LOCAL = ("localhost", "127.0.0.1")
_DAYS = 30
_MARGIN = datetime.timedelta(days=1)  # what ends sooner is made anew


@dataclass(frozen=True)
class NodeKey:
    """The files of a node's key: the private one stays with the node, the public is registered."""

    private: Path
    public: Path


@dataclass(frozen=True)
class Certificates:
    """The files of a deployment: by ``authority`` clients know the server again."""

    authority: Path
    certificate: Path
    key: Path
    nodes: tuple[NodeKey, ...]


def certificates(folder: Path, nodes: int, hosts: Sequence[str] = ()) -> Certificates:
    """Certificates for this machine and ``hosts``, and node keys; what is there and good stays.

    Private files can be read by their owner only, and so can the folder.
    """
    count(nodes, "nodes")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    files = Certificates(
        authority=folder / "ca.crt",
        certificate=folder / "server.crt",
        key=folder / "server.key",
        nodes=tuple(node_key(folder / f"node-{i}.key") for i in range(nodes)),
    )
    names = [*LOCAL, *(host for host in hosts if host not in LOCAL)]
    if not _good(files, names):
        _sign(files, names)
    return files


def node_key(private: Path) -> NodeKey:
    """A node's key pair, on the curve P-384 and in OpenSSH's format; made if it is not there."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    files = NodeKey(private, private.with_suffix(".pub"))
    key: object
    if private.exists():
        try:
            key = serialization.load_ssh_private_key(private.read_bytes(), password=None)
        except (OSError, ValueError, TypeError) as error:
            raise FedShuffleError(f"{str(private)!r} cannot be read: {error}.") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise FedShuffleError(f"{str(private)!r} is no elliptic curve key: delete it.")
    else:
        key = ec.generate_private_key(ec.SECP384R1())
        data = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.OpenSSH,
            serialization.NoEncryption(),
        )
        _write_private(private, data)
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    if not files.public.exists() or files.public.read_bytes() != public:
        replace(files.public, public)
    return files


def _good(files: Certificates, hosts: Sequence[str]) -> bool:
    """Whether certificates are there that fit each other, these hosts, and the calendar."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import serialization

    try:
        authority = x509.load_pem_x509_certificate(files.authority.read_bytes())
        server = x509.load_pem_x509_certificate(files.certificate.read_bytes())
        key = serialization.load_pem_private_key(files.key.read_bytes(), password=None)
        server.verify_directly_issued_by(authority)
        named = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        return False
    until = min(authority.not_valid_after_utc, server.not_valid_after_utc)
    return (
        key.public_key() == server.public_key()
        and set(_names(hosts)) <= set(named)
        and datetime.datetime.now(datetime.UTC) + _MARGIN < until
    )


def _sign(files: Certificates, hosts: Sequence[str]) -> None:
    """Make an authority and the server certificate that it signs, and write all but its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    above, own = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    known_by = x509.SubjectKeyIdentifier.from_public_key(above.public_key())
    authority = (
        _begun("fedshuffle local authority", above)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(known_by, critical=False)
        .sign(above, hashes.SHA384())
    )
    server = (
        _begun("fedshuffle local server", own)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(_names(hosts)), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(known_by),
            critical=False,
        )
        .sign(above, hashes.SHA384())
    )
    _write_private(
        files.key,
        own.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )
    replace(files.certificate, server.public_bytes(serialization.Encoding.PEM))
    replace(files.authority, authority.public_bytes(serialization.Encoding.PEM))


def _begun(subject: str, key: EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    now = datetime.datetime.now(datetime.UTC)
    names = [
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        for name in (subject, "fedshuffle local authority")
    ]
    return (
        x509.CertificateBuilder()
        .subject_name(names[0])
        .issuer_name(names[1])
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _names(hosts: Sequence[str]) -> list[x509.GeneralName]:
    from cryptography import x509

    found: list[x509.GeneralName] = []
    for host in hosts:
        try:
            found.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            found.append(x509.DNSName(host))
    return found


def _write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, at every moment of its life."""
    draft = path.with_name(path.name + ".draft")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    draft.replace(path)
