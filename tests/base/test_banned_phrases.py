"""Phrases that confused readers must not return to code, messages, and docs."""

from __future__ import annotations

import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

from places import ROOT

BANNED = {
    r"(?:is|are|was|were) none of": "is not one of",
    r"(?<!there )(?:is|are|was|were) no (?!longer|more|less|fewer|larger)": "is not a, is invalid",
    r"says? nothing": "is ignored, prints nothing, has no effect",
    r"(?:list|former|latter|value) counts|counts? for (?:nothing|one)": "is used, is included",
    r"goes on|go on with": "continues",
    r"gives? way": "yields to",
    r"is spoken|spoken of|unspoken": "is supported, is mentioned",
    r"to be had|(?:is|be|are|was) had": "available",
    r"(?:is|are|was|were) told": "name who prints or sends it",
    r"(?:is|are|was|were) said": "name who prints it",
    r"(?:is|are) warned of": "launch warns about",
    r"nobody|somebody|whoever": "no process, a user, another rank",
    r"as many as may be|however many|by turns|in whatever way": "the limit, any number, alternately, in any way",
    r"unasked": "optional, by default",
    r"mend(?:s|ed|ing)?": "fix",
    r"refuses?": "rejects",
    r"rooms|(?:this|a|each|every|other) room": "package",
    r"knows? nothing|holds? nothing|asks? nothing": "is empty, does not know",
    r"what became of": "outcome",
    r"is worth a line": "is significant",
    r"could be had back|no guess at all|settled in silence|are no numbers|in a row \(10\)":
        "see the writing rules in CONTRIBUTING.md",
    r"colours?|coloured|neighbours?|behaviours?|centre|honours?": "American spelling",
    r"(?:normal|initial|organ|optim|serial|synchron|summar|parallel|minim|maxim|util)is(?:e|es|ed|ing|ation)":
        "American spelling",
}
"""Replacement, by the regular expression of a phrase of whole words."""
UNCHECKED = ("CHANGELOG.md", "benchmarks/mutation_table/", "benchmarks/results/", "tests/")
"""Files that quote other programs, or older versions of this one."""


def prose_in(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and text: comments and strings of Python code, all lines of other files."""
    if path.suffix != ".py":
        yield from enumerate(text.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield from enumerate(token.string.splitlines(), token.start[0])


def phrases_in(path: Path, text: str) -> list[str]:
    """Return "line number: phrase: what to write instead" of each banned phrase."""
    return [f"{number}: {match[0]!r}: {instead}" for number, line in prose_in(path, text)
            for phrase, instead in BANNED.items()
            for match in re.finditer(rf"\b(?:{phrase})(?!\w)", line, re.IGNORECASE)]


def pages() -> list[Path]:
    listed = subprocess.check_output(["git", "ls-files", "*.py", "*.md", "*.sh", "*.toml"], cwd=ROOT, text=True)
    return [path for name in listed.split() if not name.startswith(UNCHECKED) and (path := ROOT / name).exists()]


def test_no_banned_phrase() -> None:
    problems = {str(path.relative_to(ROOT)): phrases for path in pages()
                if (phrases := phrases_in(path, path.read_text()))}
    assert problems == {}


def test_phrase_is_found_in_prose_only() -> None:
    code = 'def told(): pass  # the list counts\nrooms = f"{told} goes on"\n'
    assert [problem.split(":")[0] for problem in phrases_in(Path("a.py"), code)] == ["1", "2"]
    assert len(phrases_in(Path("a.md"), "It is none of ours.\nNothing.\nNobody knows.")) == 2
