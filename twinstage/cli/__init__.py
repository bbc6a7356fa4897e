"""The `twinstage` command."""
