"""Decisions, without I/O, clock or randomness of its own: what happened comes in, what is due goes out."""
