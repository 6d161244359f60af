"""A CPU's step in C++, and the library it is built into on first use."""
