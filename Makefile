# The two commands are `make serve` and `make test`. The rest are their parts, each of which works alone.

CARGO ?= cargo
BINARY := $(or $(CARGO_TARGET_DIR),target)/release/drafthorse
PYTHON ?= python3
VENV := .venv
PORTS ?=

.PHONY: serve build model test lint unit venv clients clean

## Builds, fetches the sample model if it is absent, and serves it.
serve: build model
	$(BINARY) serve --model-repository model_repository $(PORTS)

build:
	$(CARGO) build --release --bin drafthorse

model: build
	model_repository/fetch.sh $(BINARY)

## Every test that needs no GPU.
test: lint model unit clients

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings

unit:
	$(CARGO) test --workspace

## What Python clients see.
clients: build model venv
	$(VENV)/bin/python -m unittest discover -v -s tests/clients -t .

venv: $(VENV)/.ready

$(VENV)/.ready: tests/clients/requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -r tests/clients/requirements.txt
	touch $@

clean:
	$(CARGO) clean
	rm -rf $(VENV)
