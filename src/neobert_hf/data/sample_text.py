"""English text that every Python installation carries, for the demo, the notebooks and the tests."""

import ast
import re
import sysconfig
import zlib
from pathlib import Path
from pydoc_data.topics import topics


SKIPPED_FOLDERS = {"test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def python_documentation(max_documents: int | None = None) -> list[str]:
    """Return paragraphs of the language reference behind `help()`, and the docstrings of the standard library.

    These are some 8,000 distinct documents (Python 3.11) of 40 characters or more. Their order is random but the same
    on every machine: the first `max_documents` are a fair sample, and so is every 20th.
    """
    documents = [paragraph for topic in topics.values() for paragraph in re.split(r"\n\s*\n", topic)]
    library = Path(sysconfig.get_path("stdlib"))
    for file in library.rglob("*.py"):
        if SKIPPED_FOLDERS.isdisjoint(file.relative_to(library).parts):
            # The files are parsed, not imported: importing them would run them (`import this`, `import antigravity`).
            nodes = ast.walk(ast.parse(file.read_bytes()))
            documents += [ast.get_docstring(node) or "" for node in nodes if isinstance(node, DOCUMENTED)]
    # Line breaks mean nothing to BERT's tokenizer; without them more duplicates are found.
    documents = {" ".join(document.split()) for document in documents}
    long_enough = [document for document in documents if len(document) >= 40]
    # Unlike `hash()`, crc32 is the same in every process. Documents with equal crc32 are sorted by their text.
    return sorted(long_enough, key=lambda document: (zlib.crc32(document.encode()), document))[:max_documents]
