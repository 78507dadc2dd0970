"""Commands, options, and links in README and docs are valid."""

from __future__ import annotations

import functools
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from places import ROOT
from slowness import scaled

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
_COMMAND = re.compile(r"^(?: {4})?(?:\./launchers/with-env )?((?:launch|ezpz-llm|python3 -m ezpz_llm\.\w+) .*)$")
SUBCOMMANDS = {"data": ("prepare", "show", "verify", "which", "tokenizer"),
               "evaluate": ("val", "hellaswag", "harness"),
               "checkpoint": ("inspect", "export", "verify", "fetch"), "scale": ("report", "compare", "paper")}


def shown_commands() -> list[tuple[str, str]]:
    """Return (page, command) of each code line that runs a command of ezpz_llm, without its comment."""
    commands = []
    for page in PAGES:
        fenced = False
        for line in page.read_text().replace("\\\n", "").splitlines():
            if line.startswith("```"):
                fenced = not fenced
            elif fenced or line.startswith("    "):
                match = _COMMAND.match(line.split(" #")[0].rstrip(" &"))
                commands += [(page.name, match[1])] if match else []
    return commands


def parts(command: str) -> list[tuple[str, list[str]]]:
    """Split a line into its commands and their arguments: submit, launch, and the launched module.

    The arguments of the reader's own script are left out.
    """
    commands: list[tuple[str, list[str]]] = []
    words = shlex.split(command.replace("[", " ").replace("]", " "))
    for index, word in enumerate(words):
        if word == "launch":
            commands.append((word, []))
        elif word.startswith("ezpz_llm."):
            commands.append((word.removeprefix("ezpz_llm."), []))
        elif index == 1 and words[0] == "ezpz-llm":
            commands.append((word, []))
        elif index and words[index - 1] == "python3" and word.endswith(".py"):
            break
        elif commands:
            commands[-1][1].append(word)
    return commands


@pytest.mark.parametrize("words", ["launch", "pytest"])
def test_readme_has_each_command_that_ci_runs(words: str) -> None:
    """The command must be on its own line, indented as code, because .ci/run extracts it with sed."""
    pattern = re.search(r"line=\$\(sed -n \"(.*)\" README.md", (ROOT / ".ci/run").read_text())
    assert pattern is not None
    line = subprocess.check_output(["sed", "-n", pattern[1].replace("$1", words), ROOT / "README.md"], text=True)
    assert line.startswith(f"./launchers/with-env {words}")


@functools.cache
def help_of(*words: str) -> str:
    page = "--help-all" if words[0] == "train" else "--help"
    done = subprocess.run([sys.executable, "-m", f"ezpz_llm.{words[0]}", *words[1:], page], capture_output=True,
                          text=True, timeout=scaled(60), check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def commands() -> list[tuple[str, str]]:
    found = shown_commands()
    assert len(found) > 70
    return found


def test_every_option_in_the_docs_exists(commands: list[tuple[str, str]]) -> None:
    missing = []
    for page, command in commands:
        for name, words in parts(command):
            known = help_of(name, *(word for word in words[:1] if word in SUBCOMMANDS.get(name, ())))
            options = [word.split("=")[0] for word in words if re.fullmatch("--[a-z][a-z0-9-]*(=.*)?", word)]
            missing += [f"{page}: {command}: {option}" for option in options
                        if not re.search(rf"{option}\b", known)]
    assert missing == []


def test_no_page_installs_the_package_from_an_index() -> None:
    """It is not published. pip finds extras of an installed package without an index."""
    pattern = r"pip install (ezpz_llm\b|'ezpz_llm\[train\])"
    assert [page.name for page in PAGES if re.search(pattern, page.read_text())] == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = [line.lstrip("# ").lower() for line in page.read_text().splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


def test_every_link_is_valid_and_every_page_is_linked() -> None:
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
    assert [page.name for page in PAGES if ROOT / "docs" in page.parents and page not in linked] == []


USE = sorted((ROOT / "docs" / "use").glob("*.md"))


def sentences(text: str) -> list[str]:
    """Return the sentences in paragraphs, list items, and table cells of a page, without code and headings."""
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    blocks: list[str] = []
    is_open = False
    for line in text.splitlines():
        words = line.strip()
        if words.startswith("|"):
            blocks += [cell.strip() for cell in words.strip("|").split(" | ")]
            is_open = False
        elif not words or words.startswith("#") or (line.startswith("    ") and not is_open):
            is_open = False
        elif is_open and not re.match(r"[-*] |\d+\. ", words):
            blocks[-1] += f" {words}"
        else:
            blocks.append(words)
            is_open = True
    return [sentence for block in blocks for sentence in re.split(r"(?<=[.!?])\s+", block)]


def test_user_pages_are_few_and_have_short_sentences() -> None:
    assert 1 <= len(USE) <= 10
    by_page = {page.name: sentences(page.read_text()) for page in USE}
    assert min(map(len, by_page.values())) > 10, "each page has sentences"
    assert [(name, sentence) for name, page_sentences in by_page.items() for sentence in page_sentences
            if len(sentence.split()) > 30] == []


def test_sentence_ends_at_a_full_stop_or_with_its_paragraph() -> None:
    text = "# No heading\nOne two\nthree. Four.\n\n- five\n  six\n\n    code here\n| a b | c |\n```\nno\n```\n"
    assert sentences(text) == ["One two three.", "Four.", "- five six", "a b", "c"]


def test_readme_is_short_and_has_a_diagram() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 160
    assert text.count("```mermaid") == 1


@pytest.mark.full
def test_site_has_every_page_and_no_dead_link_and_loads_nothing_from_the_network(tmp_path: Path) -> None:
    """Requires mkdocs-material: `pip install 'ezpz_llm[docs]'`."""
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", ROOT / "mkdocs.yml", "-d",
               tmp_path / "site"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(120), check=False)
    assert done.returncode == 0, done.stderr
    for page in (ROOT / "docs").glob("*/*.md"):
        html = (tmp_path / "site" / page.parent.name / page.stem / "index.html").read_text()
        loaded = re.findall(r"""<(?:script|img|iframe)[^>]*\ssrc="([^"]+)|<link[^>]*\shref="([^"]+)""", html)
        assert [url for url in map("".join, loaded) if url.startswith(("http", "//"))] == []
        for link in re.findall(r"""<a[^>]*\shref="([^"#]+)""", html):
            target = tmp_path / "site" / page.parent.name / page.stem / link
            assert link.startswith("http") or target.exists(), (page.name, link)


def test_site_lists_every_page() -> None:
    listed = re.findall(r"(?:use|reference|evidence)/\w+\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(listed) == sorted(page.relative_to(ROOT / "docs").as_posix()
                                    for page in (ROOT / "docs").glob("*/*.md"))


def test_links_of_the_site_to_files_outside_docs_are_paths_or_lead_to_the_repository() -> None:
    spec = importlib.util.spec_from_file_location("site_links", ROOT / "docs/site_links.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    page = SimpleNamespace(file=SimpleNamespace(src_uri="use/install.md"))
    text = "[a](../reference/data.md) [the table](../../benchmarks/a.md#b) [`jobs/b.sh`](../../jobs/b.sh)"
    assert hook.on_page_markdown(text, page, SimpleNamespace(repo_url=None)) == (
        "[a](../reference/data.md) the table (`benchmarks/a.md` in the repository) `jobs/b.sh`")
    assert "[the table](https://a/b/blob/main/benchmarks/a.md#b)" in hook.on_page_markdown(
        text, page, SimpleNamespace(repo_url="https://a/b/"))
