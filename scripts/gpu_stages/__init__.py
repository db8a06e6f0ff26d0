"""The stages of `scripts/gpu_check.py`, each a module with a `run`."""
