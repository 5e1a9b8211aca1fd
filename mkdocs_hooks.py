"""Adds files from outside of docs/, the notebooks, the settings and the API reference to the site of `make docs`.

The pages have links that work on GitHub. In the site, README.md is the front page, while the lab notes and results keep
their paths, so the links between pages are rewritten here.
"""

import json
import posixpath
import re
import sys
from pathlib import Path

from mkdocs.structure.files import File


ROOT = Path(__file__).parent
PACKAGE = ROOT / "src" / "neobert_hf"
MODEL = ("models/distilled/README.md", "models/distilled/HOW.md", "models/minilm_3_layers/README.md")
# Path in the repository: path in the site.
ADDED = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
ADDED |= {name: name for name in ("LICENSE", "CITATION.cff", "AGENTS.md", "benchmarks/NOTES.md", *MODEL)}
ADDED |= {
    str(file.relative_to(ROOT)): str(file.relative_to(ROOT))
    for file in sorted((ROOT / "benchmarks" / "results").glob("*"))
    if file.suffix in (".md", ".png")
}
NOTEBOOKS = {
    f"examples/notebooks/{file.name}": f"notebooks/{file.stem}.md"
    for file in sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
}
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[)#])")
CELL, FLAG = re.compile(r"<td.*?</td>", re.DOTALL), re.compile(r"(?<![\w-])--\w+")


def on_files(files, config):
    """Add the files of `ADDED`, notebooks, settings, and a page of the API for the model and each subpackage."""
    for source, target in ADDED.items():
        content = (ROOT / source).read_bytes() if not source.endswith(".md") else (ROOT / source).read_text()
        files.append(File.generated(config, target, content=content))
    for folder in sorted(folder for folder in PACKAGE.iterdir() if (folder / "__init__.py").is_file()):
        page = _api_page(folder.name, folder.rglob("*.py"))
        files.append(File.generated(config, f"api/{folder.name}.md", content=page))
    files.append(File.generated(config, "api/model.md", content=_api_page("model", PACKAGE.glob("*_neobert.py"))))
    files.append(File.generated(config, "settings.md", content=_settings_page()))
    for notebook, target in NOTEBOOKS.items():
        files.append(File.generated(config, target, content=_notebook_page(ROOT / notebook)))
    return files


def _settings_page() -> str:
    """What each command's `--help` prints: the settings of a recipe, which are its keywords in Python."""
    lines = [
        "# Settings",
        "",
        "The settings of each recipe are flags of its command and keywords of its function. Those of",
    ]
    lines += ["Transformers are explained at its `TrainingArguments`; `--help_all` lists them."]
    sys.path.insert(0, str(PACKAGE.parent))
    from neobert_hf_cli import COMMANDS

    for title, commands in COMMANDS.items():
        lines += ["", f"## {title}"]
        for command, (module, *_) in commands.items():
            text = (PACKAGE / "help" / f"{command}.txt").read_text().split("\n", 2)[2]
            lines += ["", f"### {command}", "", f"`neobert_hf.{module}.{command}`", "", "```text", text.rstrip(), "```"]
    return "\n".join(lines) + "\n"


def _notebook_page(notebook: Path) -> str:
    """A notebook with its stored outputs as Markdown."""
    lines = []
    for cell in json.loads(notebook.read_text())["cells"]:
        source = "".join(cell["source"])
        lines += [source, ""] if cell["cell_type"] == "markdown" else ["```python", source, "```", ""]
        for output in cell.get("outputs", []):
            text = output.get("text") or output.get("data", {}).get("text/plain", [])
            if text:
                lines += ["```text", "".join(text).rstrip(), "```", ""]
    return "\n".join(lines)


def _api_page(title: str, modules) -> str:
    """Markdown that mkdocstrings fills with the docstrings of the modules."""
    lines = [f"# {title}"]
    for file in sorted(modules):
        if file.name != "__init__.py":
            name = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
            lines += ["", f"::: {name}"]
    return "\n".join(lines) + "\n"


def on_page_markdown(markdown, page, config, files):
    """Turn links of the repository into links of the site. A link that leads to no page stays, with a warning."""
    in_site = {target: source for source, target in ADDED.items()}
    page_in_repository = in_site.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def to_site(match: re.Match) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page_in_repository), match[1]))
        if path == "benchmarks/results":
            path = "benchmarks/results/README.md"
        target = (ADDED | NOTEBOOKS).get(path, path.removeprefix("docs/"))
        return posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or ".")

    return LINK.sub(to_site, markdown)


def on_page_content(html, page, config, files):
    """In the narrow columns of tables, browsers would break `--flag` behind its hyphens."""
    return CELL.sub(lambda cell: FLAG.sub(r'<span class="flag">\g<0></span>', cell[0]), html)
