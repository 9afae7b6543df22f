"""Binary format of handle words, arena headers and block headers, as docs/wire-format.md specifies it."""
