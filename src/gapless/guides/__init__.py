"""WHICH tokens may come next for a request: implementations of core/guide.py. No torch."""
