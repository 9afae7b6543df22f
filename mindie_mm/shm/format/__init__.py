"""The bytes in shared memory: handle words, arena header, block header. Normative: docs/wire-format.md."""
