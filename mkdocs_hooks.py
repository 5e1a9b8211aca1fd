"""Adds files from outside of docs/ and the API reference to the site that `make docs` builds.

The pages have links that work on GitHub. In the site, README.md is the front page, while the lab notes and results keep
their paths, so the links between pages are rewritten here.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File


ROOT = Path(__file__).parent
PACKAGE = ROOT / "src" / "neobert_hf"
# Path in the repository: path in the site.
ADDED = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
ADDED |= {name: name for name in ("LICENSE", "benchmarks/NOTES.md", "models/distilled/README.md")}
ADDED |= {
    str(file.relative_to(ROOT)): str(file.relative_to(ROOT))
    for file in sorted((ROOT / "benchmarks" / "results").glob("*"))
    if file.suffix in (".md", ".png")
}
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[)#])")


def on_files(files, config):
    """Add the files of `ADDED`, and a page of the API for the model and for each subpackage."""
    for source, target in ADDED.items():
        content = (ROOT / source).read_bytes() if not source.endswith(".md") else (ROOT / source).read_text()
        files.append(File.generated(config, target, content=content))
    for folder in sorted(folder for folder in PACKAGE.iterdir() if (folder / "__init__.py").is_file()):
        page = _api_page(folder.name, folder.rglob("*.py"))
        files.append(File.generated(config, f"api/{folder.name}.md", content=page))
    files.append(File.generated(config, "api/model.md", content=_api_page("model", PACKAGE.glob("*_neobert.py"))))
    return files


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
        target = ADDED.get(path, path.removeprefix("docs/"))
        return posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or ".")

    return LINK.sub(to_site, markdown)
