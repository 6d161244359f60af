"""HTTP: the API process, and the engine process that it starts and watches.

The API process never loads torch; only `engine_process`, which runs in a process of its own, knows the engine.
"""
