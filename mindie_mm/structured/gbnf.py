r"""Translates GBNF, the grammar syntax of llama.cpp and xgrammar, into llguidance's Lark syntax.

llguidance's converter parses the grammar. The converter's Lark output is not used, because its meaning sometimes
differs from the meaning in GBNF: a terminal matches as much text as possible, `.` does not match a newline, `[a&&b]` is
an intersection, and `\u0041B` is U+41B. Instead, a grammar without recursion is translated into one regular expression.
In any other grammar, each terminal is a single character, so that a terminal cannot match text that belongs to the next
terminal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from llguidance.gbnf_to_lark import (
    AlternativeNode,
    ASTNode,
    GbnfToLarkError,
    GrammarParser,
    LiteralNode,
    RegexNode,
    RepetitionNode,
    RuleNode,
    RuleRefNode,
    SequenceNode,
)

from mindie_mm.errors import InputError

_RULE = re.compile(r"^[ \t]*[A-Za-z][\w-]*[ \t]*::=", re.MULTILINE)
_PIECE = re.compile(r'#[^\r\n]*|"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]', re.DOTALL)
"""Pattern of a comment, a literal or a character class."""
_CHARACTER = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL)
_READ_CHARACTER = re.compile(r"\\U([0-9a-f]*)|-")
"""Pattern of a character in the converter's result, or of the hyphen of a range. The group is the code point in
hexadecimal, without leading zeros."""
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "[": "[", "]": "]"}


def is_gbnf(grammar: str) -> bool:
    """Return whether a grammar is in GBNF. Other grammars are in Lark."""
    return _RULE.search(grammar) is not None


def lark_of_gbnf(grammar: str, start: str = "start", *, whole: bool = True) -> str:
    """Translate a GBNF grammar into Lark.

    Args:
        grammar: Grammar with a rule `root`.
        start: Name of the first rule in Lark, in lower case. The names of all other rules begin with this name.
        whole: Whether the grammar describes the whole output. If so, terminals may match as much text as possible.

    Raises:
        InputError: The grammar is not valid, or refers to tokens.

    """
    try:
        rules = GrammarParser().parse(_PIECE.sub(_respelled, grammar))
        return _Writer(rules, start, by_character=not whole).text()
    except GbnfToLarkError as error:
        raise InputError(f"the grammar is not valid GBNF: {error}") from error
    except RecursionError as error:
        raise InputError("the grammar is nested too deeply") from error


def _respelled(match: re.Match[str]) -> str:
    r"""Rewrite each character of a literal or class as `\U` and eight digits, which can represent every character."""
    piece = match[0]
    if piece.startswith("#"):
        return piece
    opening = "[^" if piece.startswith("[^") else piece[0]
    characters = (_respelled_character(c, opening) for c in _CHARACTER.finditer(piece[len(opening) : -1]))
    return opening + "".join(characters) + piece[-1]


def _respelled_character(match: re.Match[str], opening: str) -> str:
    if match[5] == "-" and opening != '"':
        return "-"
    if match[4] is not None and match[4] not in _ESCAPES:
        raise InputError(f"the grammar is not valid GBNF: \\{match[4]} is not an escape sequence")
    digits = match[1] or match[2] or match[3]
    code = int(digits, 16) if digits else ord(_ESCAPES[match[4]] if match[4] else match[5])
    return f"\\U{code:08x}"


class _Writer:
    """Writes the rules of a grammar in Lark."""

    def __init__(self, rules: Mapping[str, RuleNode], start: str, *, by_character: bool) -> None:
        if "root" not in rules:
            raise InputError("the grammar is not valid GBNF: it has no rule named root")
        self._rules = rules
        self._start = start
        self._used: dict[str, int] = {}
        """Index of each rule that `root` refers to, directly or indirectly."""
        self._open: set[str] = set()
        self._by_character = by_character  # also set for recursive grammars
        self._visit("root")

    def text(self) -> str:
        lines = [f"{self._name(rule)}: {self._node(self._rules[rule].alternatives)}" for rule in self._used]
        if not self._by_character:
            lines.insert(0, f"{self._start}: {self._name('root')}")
        return "\n".join(lines)

    def _visit(self, rule: str) -> None:
        """Record a rule and all rules that it refers to."""
        if rule in self._open:
            self._by_character = True
        if rule in self._used:
            return
        if rule not in self._rules:
            raise InputError(f"the grammar is not valid GBNF: there is no rule {rule!r:.40}")
        self._used[rule] = len(self._used)
        self._open.add(rule)
        left: list[ASTNode] = [self._rules[rule].alternatives]
        while left:
            node = left.pop()
            if isinstance(node, RuleRefNode):
                self._visit(node.name)
            left += node.children()
        self._open.remove(rule)

    def _name(self, rule: str) -> str:
        """Return the name of a rule in Lark. Names of terminals are in capitals."""
        if self._by_character:
            return self._start if rule == "root" else f"{self._start}_{self._used[rule]}"
        return f"{self._start}_{self._used[rule]}".upper()

    def _node(self, node: ASTNode) -> str:
        match node:
            case AlternativeNode():
                return " | ".join(self._node(one) for one in node.alternatives)
            case SequenceNode():
                return " ".join(self._part(one) for one in node.nodes) or '""'
            case _:
                return self._part(node)

    def _part(self, node: ASTNode) -> str:
        match node:
            case LiteralNode():
                characters = [_regex(code) for code in _READ_CHARACTER.findall(node.value)]
                if not characters:
                    return '""'
                return f"(/{('/ /' if self._by_character else '').join(characters)}/)"
            case RegexNode():
                return "/(?s:.)/" if node.rx == "." else f"/{_class(node.rx)}/"
            case RuleRefNode():
                return self._name(node.name)
            case RepetitionNode():
                most = "" if node.max_times is None else node.max_times
                # llguidance refuses repetitions with a maximum of 0.
                return '""' if most == 0 else f"{self._part(node.node)}{{{node.min_times},{most}}}"
            case _:
                return f"({self._node(node)})"


def _regex(code: str) -> str:
    """Return a regular expression for a character, given its code point in hexadecimal without leading zeros."""
    return f"\\x{{{code or '0'}}}"


def _class(read: str) -> str:
    """Convert a character class to the syntax of llguidance's regular expressions.

    A hyphen at the beginning or at the end of the class is a literal hyphen.
    """
    opening = "[^" if read.startswith("[^") else "["
    parts: list[str] = []
    signs: list[bool] = []
    for match in _READ_CHARACTER.finditer(read):
        signs.append(match[0] == "-")
        parts.append(_regex(match[1] if match[1] is not None else "2d"))
    written, at = "", 0
    while at < len(parts):
        if at + 2 < len(parts) and signs[at + 1]:
            written += f"{parts[at]}-{parts[at + 2]}"
            at += 3
        else:
            written += parts[at]
            at += 1
    return f"{opening}{written}]"
