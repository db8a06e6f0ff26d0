"""Model definitions and the numbers that fix them."""
