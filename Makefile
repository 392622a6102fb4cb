# Everything that a person or the CI runs. `make` lists the targets.
PYTHON ?= python3
TORCH ?= torch==2.13.0
# Spec-Bench's questions where they are at hand; else benchmarks take a built-in set of the same kinds.
PROMPTS ?= $(wildcard ../shared/data/spec_bench/question.jsonl)
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
STUBS := shared/pb/specwire/v1
BENCH = $(PY) -m cloud_verifier.benchmarks

.DEFAULT_GOAL := help
.PHONY: help demo test test-all system lint format proto proto-check bench-loopback bench-logits bench-network bench-capacity soak fuzz certs experiment-basic \
	edge-binary edge-bundle bench-client clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

$(READY): pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install '$(TORCH)'
	$(PY) -m pip install --editable '.[dev]'
	touch $@

demo: $(READY)  ## a device and a verifier write an answer together, on the built-in model
	$(PY) -m cloud_verifier.demo

test: $(READY) system  ## the tests that CI runs
	$(PY) -m pytest -m 'not slow'

test-all: $(READY) system  ## those, and the slow and statistical ones
	$(PY) -m pytest

system:  ## Debian packages that some tests use, when run as root
	deploy/system-packages.sh

lint: $(READY)  ## format, lint and types
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/mypy deploy/netlab

format: $(READY)  ## let ruff format and fix
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

# The odd include path makes protoc write imports from shared.pb, so the stubs need no patching.
proto: $(READY)  ## regenerate the stubs from proto/
	$(PY) -m grpc_tools.protoc -Ishared/pb=proto --python_out=. --pyi_out=. --grpc_python_out=. $(STUBS)/verifier.proto

proto-check: proto  ## fail when the committed stubs are stale
	git diff --exit-code -- $(STUBS)

bench-loopback: $(READY)  ## both sides on this machine -> bench-results/loopback.json
	$(BENCH).loopback $(if $(PROMPTS),--prompts $(PROMPTS)) --out bench-results/loopback.json

bench-logits: $(READY)  ## codecs and verifications on recorded distributions -> bench-results/logits.json
	$(BENCH).logits $(if $(PROMPTS),--prompts $(PROMPTS)) --out bench-results/logits.json

bench-network: $(READY)  ## every arm on every emulated link, about two hours; NETWORK="--profiles lan 5g" for a part
	$(BENCH).network $(if $(PROMPTS),--prompts $(PROMPTS)) --out bench-results/network.json $(NETWORK)

bench-capacity: $(READY)  ## sessions that one verifier carries, recorded drafts -> bench-results/capacity.json
	$(BENCH).capacity $(if $(PROMPTS),--prompts $(PROMPTS)) --out bench-results/capacity.json

soak: $(READY)  ## 32 restless clients, two verifiers, one killed every 20 s; SOAK_SECONDS=300
	SPECWIRE_SOAK_S=$(or $(SOAK_SECONDS),300) $(PY) -m pytest -s tests/cloud_verifier/test_soak.py

fuzz: $(READY)  ## coverage-guided fuzzing of all that a verifier decodes; FUZZ_SECONDS=60
	$(PY) -m pip install --quiet atheris
	mkdir -p bench-results
	$(PY) tests/cloud_verifier/fuzz_decoders.py -max_total_time=$(or $(FUZZ_SECONDS),60) -artifact_prefix=bench-results/

certs: $(READY)  ## certificates for development -> deploy/certs/; HOSTS="verifier.example 192.0.2.7"
	$(PY) deploy/certs.py deploy/certs $(HOSTS)

experiment-basic: $(READY)  ## autoregressive against speculative: time, acceptance, perplexity, KS test
	$(BENCH).basic $(if $(PROMPTS),--prompts $(PROMPTS)) --out bench-results/experiment-basic.json

edge-binary: $(READY)  ## the client as one folder that needs no Python -> dist/edge-client
	$(PY) deploy/binary/build.py

edge-bundle: $(READY)  ## that, with the built-in draft model beside it
	$(PY) deploy/binary/build.py --with-draft

bench-client: edge-binary  ## what the client costs -> bench-results/client.json
	$(BENCH).client --out bench-results/client.json

clean:  ## remove what was built here; the models in the cache stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
