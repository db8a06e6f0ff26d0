"""Other people's clients against our server; see `run.py`."""
