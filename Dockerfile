# syntax=docker/dockerfile:1
# Two images. The default one has perilune-operator, -gateway and -extension-server; `--target engine` has the simulated engine
# (`perilune engine`) as well. Each program ends at once on SIGTERM (the gateway after its answers), so none needs an init.
# Debian 12 works as a base, too; 13's Python 3.13 takes a tenth less CPU than 12's 3.11. A base that has python3 and
# python3-venv needs no apt mirror. With openssl, which ca-certificates bring along, the operator makes certificates.
ARG BASE=docker.io/library/debian:trixie-slim

FROM ${BASE} AS dependencies
RUN python3 -c 'import venv, ensurepip' 2>/dev/null || { \
      apt-get update && apt-get install -y --no-install-recommends python3 python3-venv ca-certificates; }
RUN python3 -m venv /opt/perilune
WORKDIR /src
COPY requirements-image.lock ./
RUN /opt/perilune/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes -r requirements-image.lock
COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY gateway gateway
COPY operator operator
# The next two stages differ in the packages that they copy: the wheel has what is there. COMPILE makes bytecode that is not
# compared with the times of its sources, since a release changes those: without it each start would compile everything.
# (It fails for a file that is for another Python; such files are left out.)
ENV INSTALL="/opt/perilune/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --no-build-isolation ." \
    TOOLS="hatchling editables trove-classifiers pathspec pluggy setuptools" \
    COMPILE="/opt/perilune/bin/python3 -m compileall -q -f --invalidation-mode unchecked-hash /opt/perilune/lib"

FROM dependencies AS with-lab
COPY lab lab
RUN ${INSTALL} && /opt/perilune/bin/pip uninstall -y --quiet ${TOOLS} && /opt/perilune/bin/pip uninstall -y --quiet pip \
 && { ${COMPILE} || true; }

FROM dependencies AS without-lab
RUN ${INSTALL} && rm /opt/perilune/bin/perilune \
 && /opt/perilune/bin/pip uninstall -y --quiet ${TOOLS} && /opt/perilune/bin/pip uninstall -y --quiet pip \
 && { ${COMPILE} || true; }

FROM ${BASE} AS runtime
RUN command -v python3 >/dev/null || { \
      apt-get update && apt-get install -y --no-install-recommends python3 ca-certificates openssl \
      && rm -rf /var/lib/apt/lists/*; }
ENV PATH=/opt/perilune/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
WORKDIR /tmp

FROM runtime AS engine
COPY --from=with-lab /opt/perilune /opt/perilune
CMD ["perilune", "engine", "--listen", "0.0.0.0:8000"]

FROM runtime
COPY --from=without-lab /opt/perilune /opt/perilune
CMD ["perilune-operator"]
