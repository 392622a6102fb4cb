"""Experiments over real and emulated networks: workloads, runs, reports."""
