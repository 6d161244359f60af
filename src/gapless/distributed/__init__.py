"""Past one engine: replicas on a Ray cluster. Ray places them, watches them and carries their messages."""
