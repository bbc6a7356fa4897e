"""What both kinds of worker process put around an engine: settings, the model's files, assembly, the door, the load."""
