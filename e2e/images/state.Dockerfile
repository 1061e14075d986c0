# For scenarios only: Debian's Valkey, started as the published image's entrypoint starts it.
ARG BASE
FROM ${BASE}
RUN apt-get update && apt-get install -y --no-install-recommends valkey-server
ENTRYPOINT ["valkey-server"]
