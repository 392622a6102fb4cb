"""Measurements. Each module is a command that writes one JSON file; `make help` lists them.

They run torch as the verifier does, so its environment is set here, before any of them imports torch.
"""

from cloud_verifier.cli import prepare_torch

prepare_torch(0)
