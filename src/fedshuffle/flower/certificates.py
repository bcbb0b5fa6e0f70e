"""Certificates and node keys for a deployment on this machine, to try things out.

The authority signs one server certificate and is then dropped: its private key is never written, so
nobody can sign with it later. For real servers use certificates of your own authority
(docs/deployment.md).
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedshuffle._arrays import count
from fedshuffle._files import atomic_write
from fedshuffle.errors import FedShuffleError

LOCAL = ("localhost", "127.0.0.1")
_VALID = datetime.timedelta(days=30)
_MARGIN = datetime.timedelta(days=1)
"""Certificates that expire sooner are renewed."""


@dataclass(frozen=True)
class NodeKey:
    """The files of a node's key: the private one stays with the node, the public is registered."""

    private: Path
    public: Path


@dataclass(frozen=True)
class Certificates:
    """The files of a deployment. Clients verify the server with ``authority``."""

    authority: Path
    certificate: Path
    key: Path
    nodes: tuple[NodeKey, ...]


def certificates(folder: Path, nodes: int, hosts: Sequence[str] = ()) -> Certificates:
    """Certificates for this machine and ``hosts``, and node keys; valid ones are reused.

    Only the owner can read the folder and its private files.
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
    names = {*LOCAL, *hosts}
    if not _valid(files, names):
        _issue(files, sorted(names))
    return files


def node_key(private: Path) -> NodeKey:
    """A node's key pair, on the curve P-384 and in OpenSSH's format; created if missing."""
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
        atomic_write(private, data, private=True)
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    if not files.public.exists() or files.public.read_bytes() != public:
        atomic_write(files.public, public)
    return files


def _valid(files: Certificates, hosts: set[str]) -> bool:
    """Whether the certificates exist, match each other and the hosts, and do not expire soon."""
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
    return (
        key.public_key() == server.public_key()
        and hosts <= {str(name.value) for name in named}
        and datetime.datetime.now(datetime.UTC) + _MARGIN < server.not_valid_after_utc
    )


def _issue(files: Certificates, hosts: Sequence[str]) -> None:
    """Create an authority and the server certificate that it signs; write all but its key."""
    import trustme

    now = datetime.datetime.now(datetime.UTC)
    authority = trustme.CA(organization_name="fedshuffle local authority", path_length=0)
    earlier = now - datetime.timedelta(minutes=5)  # clocks differ
    server = authority.issue_cert(*hosts, not_before=earlier, not_after=now + _VALID)
    atomic_write(files.key, server.private_key_pem.bytes(), private=True)
    atomic_write(files.certificate, server.cert_chain_pems[0].bytes())
    atomic_write(files.authority, authority.cert_pem.bytes())
