PY := .venv/bin/python
.DEFAULT_GOAL := help

.PHONY: proto
proto:  ## regenerate shared/pb from proto/
	$(PY) -m grpc_tools.protoc -Ishared/pb=proto --python_out=. --pyi_out=. --grpc_python_out=. shared/pb/specwire/v1/verifier.proto
