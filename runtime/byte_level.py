"""The characters that a byte-level vocabulary writes bytes with (GPT-2's, https://github.com/openai/gpt-2)."""

# Bytes that are printable stand for themselves, the others for characters from 256 on.
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}


def byte_level_bytes(token: str) -> bytes:
    """The bytes that a token stands for, by its text in the vocabulary; those of the text itself where that
    has any other character, as an added token may."""
    try:
        return bytes([BYTES[character] for character in token])
    except KeyError:
        return token.encode()
