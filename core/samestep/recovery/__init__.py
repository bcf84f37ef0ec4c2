"""Detect and survive failures: hung, slow and diverged ranks, and losses that are NaN or infinite."""
