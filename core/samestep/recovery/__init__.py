"""Detect failures and recover from them: hung, slow and diverged ranks, and losses that are NaN or infinite."""
