"""The documents point at what is really there. ``python tests/test_docs.py`` renews their line numbers."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[`?(?P<name>\w+)`?\]\((?P<path>[\w./]+\.py)#L(?P<line>\d+)\)")
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def definition_line(path, name):
    """The line on which a Python file defines a function or class."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if re.match(rf"\s*(def|class) {name}\b", line):
            return number
    raise AssertionError(f"{path} does not define {name}")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_code_name_the_right_line(document):
    for match in LINK.finditer(document.read_text(encoding="utf-8")):
        path = (document.parent / match["path"]).resolve()
        assert definition_line(path, match["name"]) == int(match["line"]), f"{document.name}: {match[0]}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_files_exist(document):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text(encoding="utf-8")):
        assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_every_decision_names_code_and_a_test():
    sections = (ROOT / "docs" / "ppo.md").read_text(encoding="utf-8").split("\n## ")[1:]
    numbered = [s for s in sections if re.match(r"\d+\. ", s)]
    assert [int(s.split(".")[0]) for s in numbered] == list(range(1, 15))
    for section in numbered:
        paths = [m["path"] for m in LINK.finditer(section)]
        assert any("/tests/" in p for p in paths), section[:40]
        assert any("/tests/" not in p for p in paths), section[:40]


def renew(document):
    """Write the current line number into every link to code."""

    def link(match):
        line = definition_line((document.parent / match["path"]).resolve(), match["name"])
        return f"[`{match['name']}`]({match['path']}#L{line})"

    document.write_text(LINK.sub(link, document.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    for path in DOCUMENTS:
        renew(path)
