"""Checking and timing, for any kernel and any network."""
