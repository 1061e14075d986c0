# syntax=docker/dockerfile:1
# One image: perilune-operator, perilune-gateway, and the simulated engine (perilune engine). Each ends at once on
# SIGTERM (the gateway after its answers), so none needs an init. Debian 12 will do as a base too; 13's Python 3.13 takes
# a tenth less CPU than 12's 3.11. One that has python3 and python3-venv already needs no apt mirror.
ARG BASE=docker.io/library/debian:trixie-slim

FROM ${BASE} AS build
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
COPY lab lab
RUN /opt/perilune/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --no-build-isolation . \
 && /opt/perilune/bin/pip uninstall -y --quiet hatchling editables trove-classifiers pathspec pluggy setuptools \
 && /opt/perilune/bin/pip uninstall -y --quiet pip

FROM ${BASE}
RUN command -v python3 >/dev/null || { \
      apt-get update && apt-get install -y --no-install-recommends python3 ca-certificates \
      && rm -rf /var/lib/apt/lists/*; }
COPY --from=build /opt/perilune /opt/perilune
ENV PATH=/opt/perilune/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
WORKDIR /tmp
CMD ["perilune-operator"]
