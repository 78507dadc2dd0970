"""What README and docs print can be typed: every command has every option shown, every link leads somewhere."""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
_COMMAND = re.compile(r"^(?: {4})?(?:\./launchers/with-env )?((?:launch|ezpz-llm|python3 -m ezpz_llm\.\w+) .*)$")
SUBCOMMANDS = {"data": ("prepare", "show", "verify", "tokenizer"), "evaluate": ("val", "hellaswag", "harness"),
                "checkpoint": ("inspect", "export", "verify", "fetch"), "scale": ("report", "compare")}


def shown_commands() -> list[tuple[str, str]]:
    """(page, command) of each line of code that starts one of ours, without its comment."""
    found = []
    for page in PAGES:
        fenced = False
        for line in page.read_text().replace("\\\n", "").splitlines():
            if line.startswith("```"):
                fenced = not fenced
            elif fenced or line.startswith("    "):
                match = _COMMAND.match(line.split(" #")[0].rstrip(" &"))
                found += [(page.name, match[1])] if match else []
    return found


def parts(command: str) -> list[tuple[str, list[str]]]:
    """(command, its words) for each of ours in a line: submit, the launch it queues, and what that launches."""
    cut: list[tuple[str, list[str]]] = []
    words = shlex.split(command.replace("[", " ").replace("]", " "))
    for index, word in enumerate(words):
        if word == "launch":
            cut.append((word, []))
        elif word.startswith("ezpz_llm."):
            cut.append((word.removeprefix("ezpz_llm."), []))
        elif index == 1 and words[0] == "ezpz-llm":
            cut.append((word, []))
        elif cut:
            cut[-1][1].append(word)
    return cut


@functools.cache
def help_of(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", f"ezpz_llm.{words[0]}", *words[1:], "--help"], capture_output=True,
                          text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def commands() -> list[tuple[str, str]]:
    found = shown_commands()
    assert len(found) > 70
    return found


def test_every_option_of_every_command_shown_exists(commands: list[tuple[str, str]]) -> None:
    missing = []
    for page, command in commands:
        for name, words in parts(command):
            known = help_of(name, *(word for word in words[:1] if word in SUBCOMMANDS.get(name, ())))
            options = [word.split("=")[0] for word in words if re.fullmatch("--[a-z][a-z0-9-]*(=.*)?", word)]
            missing += [f"{page}: {command}: {option}" for option in options
                        if not re.search(rf"{option}\b", known)]
    assert missing == []


def anchors(page: Path) -> set[str]:
    """What a page's headings are called in links."""
    headings = [line.lstrip("# ").lower() for line in page.read_text().splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


def test_every_link_leads_somewhere_and_every_page_is_linked() -> None:
    broken, linked = [], set()
    for page in PAGES:
        text = page.read_text()
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if target.startswith("http"):
                continue
            name, _, anchor = target.partition("#")
            path = (page.parent / name).resolve() if name else page
            if not path.exists() or (anchor and anchor not in anchors(path)):
                broken.append(f"{page.name}: {target}")
            if page.name == "README.md":
                linked.add(path)
    assert broken == []
    assert [page.name for page in PAGES if page.parent.name == "docs" and page not in linked] == []
