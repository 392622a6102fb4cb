"""The edge client: drafts with ONNX Runtime, asks a cloud verifier for verdicts."""
