"""Paths that do not exist here, and what is said about them.

Clients know paths from OpenAI's API and from other servers. A 404 says that the server does not offer what the path is
for, or which path was probably meant. Knows no HTTP.
"""

from __future__ import annotations

OFFERED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/tokenize", "/detokenize")
_GENERATES = "it generates text: use /v1/chat/completions, /v1/completions or /v1/responses"
_PURPOSES = {
    "embeddings": "embeddings",
    "embed": "embeddings",
    "pooling": "pooled hidden states",
    "rerank": "reranking",
    "score": "scores of pairs of texts",
    "classify": "classification",
    "moderations": "moderation",
    "audio": "audio",
    "images": "images",
    "videos": "videos",
    "realtime": "realtime sessions",
    "batches": "batches; `gapless run` completes a file of prompts",
    "files": "files",
    "uploads": "files",
    "vector_stores": "vector stores",
    "fine_tuning": "fine-tuning",
    "assistants": "assistants",
    "threads": "assistants",
    "messages": "Anthropic's API",
}


def about(path: str) -> str:
    """The text for a path that has no route."""
    parts = [part for part in path.split("/") if part]
    while parts and parts[0] in ("v1", "v2"):
        del parts[0]
    if parts and (purpose := _PURPOSES.get(parts[0])) is not None:
        return f"{path}: this server does not offer {purpose}; {_GENERATES}"
    meant = next((offered for offered in OFFERED if offered.removeprefix("/v1/").strip("/") == "/".join(parts)), None)
    return f"no such path: {path}" + (f"; did you mean {meant}?" if meant is not None else "; /docs lists all paths")
