"""The characters that stand for bytes in a byte-level vocabulary: themselves where printable, else from U+0100."""

from __future__ import annotations


def _byte_alphabet() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
CHAR_OF = {byte: char for char, byte in BYTE_OF.items()}
