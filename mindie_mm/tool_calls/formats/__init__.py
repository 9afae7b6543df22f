"""The formats of tool calls. Each module contains one or several related formats."""
