"""Measurements. Each module is a command that writes one JSON file; `make help` lists them."""
