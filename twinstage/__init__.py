"""What the router, the prefill workers and the decode workers of Twinstage share. Knows nothing of who uses it."""

__version__ = "0.1.0"
