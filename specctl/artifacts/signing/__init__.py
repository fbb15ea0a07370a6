"""Signatures: who vouches for an artifact, and whom this machine believes.

`keys` holds Ed25519 keys, `dsse` the envelope that they sign into, `statement` what is said of an
artifact, `trust` whom to believe and for what, `trust_file` the user's own record of it.
"""

from specctl.artifacts.signing.dsse import (
    MAX_ENVELOPE_BYTES,
    Envelope,
    Signature,
    add_signature,
    envelope_bytes,
    parse_envelope,
)
from specctl.artifacts.signing.keys import SigningKey, key_id_of
from specctl.artifacts.signing.records import Role, TrustedKey, TrustRecord, parse_trust
from specctl.artifacts.signing.statement import STATEMENT_TYPE, sign_artifact
from specctl.artifacts.signing.trust import Trust, Verified

__all__ = [
    "MAX_ENVELOPE_BYTES",
    "STATEMENT_TYPE",
    "Envelope",
    "Role",
    "Signature",
    "SigningKey",
    "Trust",
    "TrustRecord",
    "TrustedKey",
    "Verified",
    "add_signature",
    "envelope_bytes",
    "key_id_of",
    "parse_envelope",
    "parse_trust",
    "sign_artifact",
]
