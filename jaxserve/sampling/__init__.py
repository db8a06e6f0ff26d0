"""The sampler's parts, one per file; `jaxserve/sampler.py` puts them together."""
