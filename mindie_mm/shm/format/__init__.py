"""Binary format of handle words, arena headers and block headers. The normative text is docs/wire-format.md."""
