"""TLS to Redis: its files, tried before any connection, and what its errors ask of the operator."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

from pagebus.bus.contract import BusError

_REMEDIES = {
    "CERTIFICATE_VERIFY_FAILED": "has a certificate that is not trusted here: is --redis-ca-file that of its CA, "
    "and is the host named as in the certificate?",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "wants a client certificate: give --redis-cert-file and --redis-key-file",
    "TLSV1_ALERT_UNKNOWN_CA": "does not trust our client certificate: is --redis-cert-file from its CA?",
}


def check_tls_files(options: Mapping[str, Any]) -> None:
    """Load the files that a target's options name.

    Raises:
        BusError: one cannot be used. Waiting for the server would not help, and its errors would not name the file.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    ca, cert, key = (options.get(name) for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"))
    if ca is not None:
        try:
            context.load_verify_locations(ca)
        except OSError as error:
            raise BusError(f"--redis-ca-file {ca} cannot be used: {_reason(error)}") from None
    if key is not None and cert is None:
        raise BusError("--redis-key-file needs --redis-cert-file")
    if cert is not None:
        try:
            context.load_cert_chain(cert, key, options.get("ssl_password") or "")  # None would ask at the terminal
        except OSError as error:
            files = f"--redis-cert-file {cert}" + (f" with --redis-key-file {key}" if key else " without a key file")
            raise BusError(f"{files} cannot be used: {_reason(error)}") from None


def _reason(error: OSError) -> str:
    if not isinstance(error, ssl.SSLError):
        return str(error.strerror)
    return (error.reason or "").replace("_", " ").lower() or "not in PEM format, or not a certificate and its key"


def tls_remedy(error: BaseException | None) -> str | None:
    """What a connection error that stems from TLS says about the server; None for others."""
    while error is not None:
        if isinstance(error, ssl.SSLError):
            remedy = _REMEDIES.get(error.reason or "")
            return None if remedy is None else f"{remedy} ({error})"
        error = error.__cause__ or error.__context__
    return None
