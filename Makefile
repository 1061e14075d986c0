# Every target first makes .venv when it is missing or older than its lock; all commands are then .venv/bin/perilune….
# Needs: python3 >= 3.11 and make. Nothing is installed outside .venv.
PYTHON ?= python3
BIN    := .venv/bin
STAMP  := .venv/.stamp

.DEFAULT_GOAL := help
# Without bytecode every process of the hundreds that tests start compiles what it imports, and collecting tests takes twice as long.
export PYTHONDONTWRITEBYTECODE :=
.PHONY: help release-dry-run venv venv-lowest demo api-server browser prometheus state-server collector test-programs test test-heavy test-loaded test-lowest check style types layers generated verify e2e e2e-long fuzz soak bench bench-long evaluation arena docs generate lock clean cluster cluster-down e2e-cluster e2e-real e2e-real-long

help:          ## this list
	@grep -hE '^[a-z0-9-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/: .*## /\t/' | expand -t 14

venv: $(STAMP) ## make .venv with everything locked in requirements-dev.lock
venv-lowest: .venv-lowest/.stamp
$(STAMP): requirements-dev.lock pyproject.toml
.venv-lowest/.stamp: requirements-lowest.lock pyproject.toml
$(STAMP) .venv-lowest/.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: python3 >= 3.11 is needed (set PYTHON=…)"; exit 1; }
	@echo "making $(@D): the packages of $< come from PyPI, once: a minute, at most 900 MB"
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --require-hashes -r $<
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(STAMP) ## real Envoy, gateway and 8 simulated engines under agentic load; ends with a comparison
	$(BIN)/perilune demo $(ARGS)

api-server: $(STAMP) ## etcd, API server and what else the operator's tests need, from Go modules; once, ten minutes
	PYTHONPATH=e2e $(BIN)/python -m testbed.programs

prometheus:    ## Debian's Prometheus and promtool, which the tests of dashboards and alerts need (root)
	@command -v prometheus > /dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends prometheus; }

browser:       ## Debian's Chromium, which the console's tests need (root)
	@command -v chromium > /dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; }

state-server:  ## Debian's Redis, which the tests of shared state need (root)
	@command -v redis-server > /dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends redis-server; }

collector: $(STAMP) ## an OpenTelemetry collector, which the tests of traces need, from Go modules; once, minutes
	PYTHONPATH=e2e $(BIN)/python -m testbed.programs otel-collector

test-programs: api-server collector browser prometheus state-server ## all of the above: with them `make test` skips nothing

# One worker more than a small machine has cores, since some tests wait.
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest tests -n $(WORKERS) --dist loadgroup --no-loadscope-reorder --second-chance
TESTS  := $(PYTEST) --ignore=tests/bench -m "not e2e and not bench and not heavy"
test: $(STAMP) ## unit, property and integration tests (real Envoy) but the heavy ones; says first what it leaves out; minutes
	@$(BIN)/python tests/support/optional_programs.py
	$(TESTS) $(ARGS)

test-heavy: $(STAMP) ## what `make test` leaves out: tests marked `heavy`, and all examples of properties
	EXAMPLES=all $(PYTEST) -m "(heavy or hypothesis) and not e2e and not bench" $(ARGS)

test-loaded: $(STAMP) ## the same beside four busy loops: no test depends on the speed of the machine
	@loops=; trap 'kill $$loops' EXIT; for each in 1 2 3 4; do $(BIN)/python -c "while True: pass" & loops="$$loops $$!"; done; \
	  $(TESTS) $(ARGS)

# Tests of what touches a third party's package. Policies, moves, state and our HTTP/2 are pure Python, and a plan of the operator is, too.
# Properties vary inputs, which says nothing about dependencies; two long files are of pure Python, or of what others show.
LOWEST := tests/api $(addprefix tests/gateway/,feeds observe request test_config.py test_main.py) \
  $(wildcard tests/gateway/extproc/test_*.py) \
  $(patsubst %,tests/operator/test_%.py,discovery extension_server gateway_page golden lease lost_pools main refusal status)
PURE   := tests/api/test_trial.py tests/gateway/feeds/test_token_proofs.py
test-lowest: .venv-lowest/.stamp ## tests of what touches dependencies, with the lowest that pyproject.toml allows, in .venv-lowest
	.venv-lowest/bin/python -m pytest $(LOWEST) $(PURE:%=--ignore=%) -m "not api_server and not hypothesis and not heavy and not lab" \
	  -n 2 --dist loadfile $(ARGS)

check: $(STAMP) ## ruff, mypy --strict, import-linter, generated code is current; side by side
	@$(MAKE) --no-print-directory -j2 --output-sync=target types style layers generated
style: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
types: $(STAMP)
	$(BIN)/mypy
layers: $(STAMP)
	$(BIN)/lint-imports
generated: $(STAMP)
	$(BIN)/python -m protos.generate --check

verify: $(STAMP) ## all that is too heavy for each change: genuine vLLM, a real cluster, fuzz, soak; one table, and docs/verified.md (root); an hour
	PYTHONPATH=e2e $(BIN)/python e2e/verify.py $(ARGS)

e2e: $(STAMP) ## everything full-size: demo, trace replay, and (as root) the scenarios on a real cluster
	$(BIN)/python -m pytest e2e -m "(e2e or cluster) and not long" --side-by-side $(ARGS)

cluster: $(STAMP) ## the whole thing on one Linux machine (root; or KIND=1): eight nodes, Envoy Gateway, a pool
	$(BIN)/python e2e/cluster.py up $(ARGS)
	$(BIN)/python e2e/cluster.py serve

cluster-down: $(STAMP) ## stop that cluster; leaves nothing
	$(BIN)/python e2e/cluster.py down $(ARGS)

# VLLM=0.23: the older engine. DEVICE=cuda: on GPUs. With either, the table goes into a page of its own beside docs/real-engines.md.
e2e-real: export RESULTS ?= $(if $(filter 0.23% cuda,$(VLLM) $(DEVICE)),docs/real-engines.md)
e2e-real: export AGENTS ?= $(if $(filter 0.23% cuda,$(VLLM) $(DEVICE)),,docs/real-engines.md)
e2e-real: $(STAMP) ## genuine vLLM engines and Mooncake behind Envoy and our gateway (root; first installs vLLM, 6 GB)
	PYTHONPATH=e2e $(BIN)/python -m enginebed.install
	$(BIN)/python -m pytest e2e/real -m real $(ARGS)

e2e-real-long: $(STAMP) ## the same with 600 requests in its longest phases, into docs/real-engines.md
	PYTHONPATH=e2e $(BIN)/python -m enginebed.install
	REQUESTS=600 RESULTS=docs/real-engines.md $(BIN)/python -m pytest e2e/real/test_traffic.py e2e/real/test_ranks.py \
	  e2e/real/test_ranks_on_nodes.py e2e/real/test_rig.py \
	  e2e/real/test_tensor_parallel.py e2e/real/test_window.py -m real -s $(ARGS)

e2e-long: $(STAMP) ## a real cluster: eight engines rolled, drained and deleted under load; a minute without Valkey; one gateway or four; all orders of an upgrade; the inference extension's conformance suite (root)
	ENGINES=8 ABSENT_S=60 COMPARE=1 CONFORMANCE=1 $(BIN)/python -m pytest e2e/test_leaving.py e2e/test_gateways.py \
	  e2e/test_one_gateway_or_four.py e2e/test_conformance.py e2e/test_conformance_of_plain_envoy_gateway.py \
	  -m cluster -s $(ARGS)
	$(BIN)/python -m pytest tests e2e -m long -s $(ARGS) || test $$? = 5  # ARGS=-k may leave none

e2e-cluster: $(STAMP) ## scenarios on a cluster of their own: Envoy Gateway, our gateway, engines (root)
	$(BIN)/python -m pytest e2e -m "cluster and not long" $(ARGS)

# MINUTES=1: less of it. ARGS="bodies --seed 7": one kind, again; ARGS=--help lists them.
fuzz: $(STAMP) ## every reader of bytes that others write, fuzzed for MINUTES each (Linux; first installs atheris); an hour and a half
	test -e .venv-fuzz || $(PYTHON) -m venv .venv-fuzz
	.venv-fuzz/bin/python -m pip install --quiet --disable-pip-version-check atheris==3.0.0
	echo "$$PWD"/.venv/lib/python3*/site-packages > $$(echo .venv-fuzz/lib/python3*/site-packages)/ours.pth
	PYTHONPATH=gateway:operator:protos:tests/support:tests/fuzz .venv-fuzz/bin/python tests/fuzz/fuzz.py --minutes $(or $(MINUTES),10) $(ARGS)

soak: $(STAMP) ## streams while engines are killed, one is bad and the gateway is restarted (MINUTES=30 STREAMS=500)
	MINUTES=$(or $(MINUTES),30) STREAMS=$(or $(STREAMS),500) \
	  $(BIN)/python -m pytest tests/integration/test_soak.py -m bench -n 0 -s $(ARGS)

BENCHES := growing new_prompts decision decision_log shadow index tokens parse start
# ARGS=--strict-bars: a missed bar, which is only said otherwise, fails its benchmark.
# ARGS="--against OTHER/.venv/bin/python": another checkout's gateway is measured in turn with this one's.
bench: $(STAMP) ## what the gateway costs, first for growing conversations and new prompts, into docs/benchmarks.md; minutes
	$(BIN)/python -m pytest $(BENCHES:%=tests/bench/bench_%.py) -m bench -s --write $(ARGS)

bench-long: $(STAMP) ## the other benchmarks: a fleet's KV events, memory over 200,000 requests (needs wrk), simulator, shared state, tenants, a storm of abuse
	$(BIN)/python -m pytest tests/bench tests/integration/test_abuse.py tests/integration/test_shared_state.py \
	  $(BENCHES:%=--ignore=tests/bench/bench_%.py) \
	  -m bench -s --write $(ARGS)

# ARGS="--minutes 60": what fits into an hour of what is missing. TRACES: the folder of Mooncake's two traces, without which recorded traffic is left out.
TRACES ?= traces
evaluation: $(STAMP) ## the tables and data of docs/evaluation, simulated; hours (ARGS=--quick: ten minutes, into build/evaluation)
	$(BIN)/python -m perilune_research evaluation --traces $(TRACES) $(ARGS)

# ARGS="--minutes 30": what fits into this time of the cells that docs/arena.json lacks. ARGS="--trace FILE": with
# recorded traffic, which is left out without a recording. ARGS=--help explains all.
arena: $(STAMP) ## the same sessions through other routers and ours, in front of the same simulated engines, into docs/benchmarks.md; hours
	$(BIN)/python -m perilune_research arena --json docs/arena.json --page docs/benchmarks.md --quiet $(ARGS)

# HELM=PROGRAM, or the one that `make api-server` builds.
HELM ?= $(or $(shell command -v helm),$(HOME)/.cache/perilune/bin/helm)
release-dry-run: $(STAMP) ## wheel, chart and bill of materials of a release, into build/release; publishes nothing
	$(BIN)/python -m release --helm $(HELM) $(ARGS)

docs: $(STAMP) ## the documents as a site, into build/site
	$(BIN)/mkdocs build --strict $(ARGS)

generate: $(STAMP) ## regenerate what is generated (protobuf code, CRD, docs/configuration.md)
	$(BIN)/python -m protos.generate

lock:          ## renew the lock files (needs uv)
	uv pip compile -q --generate-hashes --no-emit-index-url --universal --python-version 3.11 --extra tracing --group image pyproject.toml -o requirements-image.lock
	uv pip compile -q --generate-hashes --no-emit-index-url --universal --python-version 3.11 --extra lab --extra tracing --group dev pyproject.toml -o requirements-dev.lock
	uv pip compile -q --generate-hashes --no-emit-index-url --universal --python-version 3.11 --resolution lowest-direct \
	  --extra tracing --group test pyproject.toml -o requirements-lowest.lock

clean:         ## remove .venv, .venv-lowest and caches
	rm -rf .venv .venv-lowest .venv-fuzz .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
