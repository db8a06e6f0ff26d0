"""Measuring the engine: workloads in, figures out."""
