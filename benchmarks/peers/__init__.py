"""jaxserve beside other engines on a CPU: the same work, in turns, in one run.

python -m benchmarks.peers
"""
