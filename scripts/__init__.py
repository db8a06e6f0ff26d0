"""Programs that are run by hand."""
