# For scenarios only: real Mooncake (master and client, CPU over TCP) beside the simulated engine, and a program
# called vllm that starts both by vLLM's own flags and configuration file.
ARG BASE
ARG PERILUNE
FROM ${BASE} AS mooncake
RUN apt-get update && apt-get install -y --no-install-recommends libibverbs1 libcurl4 libnuma1
COPY mooncake.lock ./
RUN python3 -m venv /opt/mooncake \
 && /opt/mooncake/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --require-hashes -r mooncake.lock
# what the wheel's programs need of Debian: a folder that can be laid beside any image of the same Debian
RUN cd /opt/mooncake/lib/python3*/site-packages/mooncake && chmod +x mooncake_master && mkdir /opt/mooncake/shared \
 && ! ldd mooncake_master store.so | grep "not found" \
 && ldd mooncake_master store.so | awk '$3 ~ "^/(usr/)?lib/" {print $3}' | sort -u | xargs cp -L -t /opt/mooncake/shared

FROM ${PERILUNE}
COPY --from=mooncake /opt/mooncake /opt/mooncake
COPY vllm /usr/local/bin/vllm
ENV LD_LIBRARY_PATH=/opt/mooncake/shared PATH=/opt/perilune/bin:/opt/mooncake/bin:/usr/local/bin:/usr/bin:/bin
