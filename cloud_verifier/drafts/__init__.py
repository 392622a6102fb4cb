"""Draft models: fetching the built-in pair, exporting to ONNX. Needs torch, so it lives on this side."""
