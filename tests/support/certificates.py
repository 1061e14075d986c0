"""Key pairs for tests, made by openssl. Each is signed by itself, so its certificate is its own CA."""

import subprocess
from pathlib import Path


def make(
    folder: Path, name: str = "tls", *, password: str = "", host: str = "IP:127.0.0.1"
) -> tuple[Path, Path]:
    """Write NAME.crt and NAME.key for this host into `folder`; files that are there are replaced whole."""
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    new = [file.with_suffix(f"{file.suffix}.new") for file in (cert, key)]
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-days", "2", "-subj", "/CN=gateway", "-addext", f"subjectAltName={host}"),
            *("-out", new[0], "-keyout", new[1]),
            *(("-passout", f"pass:{password}") if password else ("-nodes",)),
        ],
        check=True,
        capture_output=True,
    )
    for file, made in zip((cert, key), new, strict=True):
        made.rename(file)
    return cert, key
