"""One worker for each engine; each imports its engine and nothing of the others."""
