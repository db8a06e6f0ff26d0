"""Programs that measure; they are run by hand, on a quiet machine."""
