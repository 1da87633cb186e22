"""Certificates and keys for one network on loopback, made anew each time: nothing secret is ever kept."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

LIFETIME = datetime.timedelta(days=2)


@dataclass(frozen=True)
class Keys:
    """Files of a server: the authority that vouches for it, its certificate, and its private key."""

    authority: Path
    certificate: Path
    key: Path


def make_keys(folder: Path) -> Keys:
    """An authority of its own, and a certificate for 127.0.0.1 that it signed."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = Keys(folder / "ca.crt", folder / "server.pem", folder / "server.key")
    root, server = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority = (
        _certificate("gradveil loopback authority", root, "gradveil loopback authority")
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_may_sign(), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(root.public_key()), critical=False)
        .sign(root, hashes.SHA256())
    )
    here = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        _certificate("localhost", server, "gradveil loopback authority")
        .add_extension(x509.SubjectAlternativeName(here), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(root.public_key()), critical=False)
        .sign(root, hashes.SHA256())
    )
    keys.authority.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    keys.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    _write_private(keys.key, server, serialization.PrivateFormat.PKCS8)
    return keys


def make_node_key(path: Path) -> Path:
    """A SuperNode's private key at ``path``, its public key beside it with ``.pub``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP384R1())
    _write_private(path, key, serialization.PrivateFormat.OpenSSH)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_name(f"{path.name}.pub").write_bytes(public + b"\n")
    return path


def _certificate(name: str, key: ec.EllipticCurvePrivateKey, issuer: str) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    subject, signer = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in (name, issuer))
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(signer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + LIFETIME)
    )


def _may_sign() -> x509.KeyUsage:
    no = dict.fromkeys(
        ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
         "encipher_only", "decipher_only"),
        False,
    )  # fmt: skip
    return x509.KeyUsage(key_cert_sign=True, crl_sign=True, **no)


def _write_private(path: Path, key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> None:
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
