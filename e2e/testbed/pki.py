"""Certificates (openssl, P-256, 30 days) and kubeconfigs of one cluster, in one folder."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from testbed.shell import run

_EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Pki:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make_ca(self) -> None:
        self.folder.mkdir(parents=True)
        files = ("-keyout", self.folder / "ca.key", "-out", self.folder / "ca.crt")
        uses = ("-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign")
        run(["openssl", "req", "-x509", *_EC, "-days", "30", "-subj", "/CN=cluster-ca", *files, *uses])
        run(["openssl", "genrsa", "-out", self.folder / "sa.key", "2048"])
        run(["openssl", "rsa", "-in", self.folder / "sa.key", "-pubout", "-out", self.folder / "sa.pub"])

    def certificate(
        self, file: str, name: str, group: str = "", names: Sequence[str] = (), server: bool = False
    ) -> None:
        """Write `file`.crt and `file`.key; `names` as `IP:…`, `DNS:…`."""
        key, request, certificate = (self.folder / f"{file}.{end}" for end in ("key", "csr", "crt"))
        subject = f"/O={group}/CN={name}" if group else f"/CN={name}"
        run(["openssl", "req", *_EC, "-keyout", key, "-out", request, "-subj", subject])
        extensions = [f"extendedKeyUsage={'serverAuth' if server else 'clientAuth'}"]
        if names:
            extensions.append("subjectAltName=" + ",".join(names))
        (self.folder / f"{file}.ext").write_text("\n".join(extensions))
        run(
            [
                *("openssl", "x509", "-req", "-in", request, "-out", certificate, "-days", "30"),
                *("-CA", self.folder / "ca.crt", "-CAkey", self.folder / "ca.key"),
                *("-set_serial", f"0x{_serial(file)}", "-extfile", self.folder / f"{file}.ext"),
            ]
        )

    def path(self, file: str) -> str:
        return str(self.folder / file)

    def kubeconfig(self, to: Path, server: str, certificate: str) -> None:
        def data(file: str) -> str:
            return base64.b64encode((self.folder / file).read_bytes()).decode()

        cluster = {"server": server, "certificate-authority-data": data("ca.crt")}
        user = {
            "client-certificate-data": data(f"{certificate}.crt"),
            "client-key-data": data(f"{certificate}.key"),
        }
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "perilune",
            "contexts": [{"name": "perilune", "context": {"cluster": "perilune", "user": certificate}}],
            "clusters": [{"name": "perilune", "cluster": cluster}],
            "users": [{"name": certificate, "user": user}],
        }
        to.write_text(json.dumps(document, indent=1))


def server_secret(folder: Path, name: str, namespace: str, host: str) -> dict[str, Any]:
    """Return a Secret with a certificate for a host, its key and its CA, which are made in `folder`."""
    pki = Pki(folder)
    pki.make_ca()
    pki.certificate("tls", name, names=[f"DNS:{host}"], server=True)
    files = {file: (folder / file).read_text() for file in ("tls.crt", "tls.key", "ca.crt")}
    meta = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "stringData": files}


def _serial(file: str) -> str:
    """Return a serial number of its own for each certificate, without a shared counter file."""
    return file.encode().hex()[:30]
