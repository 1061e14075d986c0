"""Makes the key and the certificate of a server that the operator runs, by openssl.

The certificate signs itself, so whoever connects trusts it alone. It is valid for ten years;
`spec.secrets.rotation` replaces it earlier.
"""

import asyncio
import re
import shutil

from perilune_operator.render.secrets import CA, CERTIFICATE, KEY

DAYS = 3_650
TIMEOUT_S = 30.0
_SETTINGS = """\
[req]
distinguished_name = name
x509_extensions = extensions
prompt = no
[name]
CN = {pool}
[extensions]
basicConstraints = critical, CA:TRUE
keyUsage = critical, digitalSignature, keyCertSign
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
subjectAltName = DNS:{host}
"""
_PARTS = re.compile(r"-----BEGIN ([A-Z ]+)-----.*?-----END \1-----\n", re.DOTALL)


def is_possible() -> bool:
    """Return whether there is an openssl."""
    return shutil.which("openssl") is not None


async def make(pool: str, host: str) -> dict[str, str]:
    """Return what a Secret with the certificate of this host contains. Raises OSError if openssl is missing
    or fails."""
    command = (
        *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-days", f"{DAYS}", "-config", "/dev/stdin", "-keyout", "/dev/stdout", "-out", "/dev/stdout"),
    )
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            made, said = await process.communicate(_SETTINGS.format(pool=pool, host=host).encode())
    finally:  # also where the operator stops meanwhile
        if process.returncode is None:
            process.kill()
            await process.communicate()
    parts = {found[1]: found[0] for found in _PARTS.finditer(made.decode())}
    if process.returncode or parts.keys() != {"PRIVATE KEY", "CERTIFICATE"}:
        raise OSError(f"openssl made no certificate: {said.decode(errors='replace')[-200:]}")
    return {CERTIFICATE: parts["CERTIFICATE"], KEY: parts["PRIVATE KEY"], CA: parts["CERTIFICATE"]}
