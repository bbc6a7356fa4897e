"""Logging, and what else tells an operator how a process fares."""
