"""Pictures of measurements: trade-off curves and slot timelines.

`knee`, `curve` and `timeline` prepare data and need no drawing library; `figure` is where
matplotlib comes in.
"""
