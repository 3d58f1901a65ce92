# Two commands do everything: `make demo` and `make test` set themselves up first.
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PROTOS := protocol/atoll_records.proto protocol/atoll_coordinator.proto protocol/atoll_peer.proto
PROTOC = $(PY) -m grpc_tools.protoc -I. --plugin=protoc-gen-mypy=$(VENV)/bin/protoc-gen-mypy

.PHONY: demo test soak check setup proto clean

demo: setup
	$(VENV)/bin/atoll demo --json atoll-demo.json

test: setup
	$(PY) -m pytest -q

# The long versions: minutes each, every test on its own, so a run that was cut off goes on with `-k`.
soak: setup
	$(PY) -m pytest -v tests/soak

check: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	sh tests/proto_in_step.sh "$(PY)" $(PROTOS)

setup: $(STAMP)

# Skipped when neither the pins nor the project's metadata changed.
$(STAMP): pyproject.toml constraints.txt
	test -x $(PY) || $${PYTHON:-python3} -m venv $(VENV)
	$(PY) -m pip install --quiet -c constraints.txt -e '.[train,bpe,hf,dev]'
	touch $(STAMP)

proto: setup
	$(PROTOC) --python_out=. --mypy_out=readable_stubs,quiet:. $(PROTOS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist
