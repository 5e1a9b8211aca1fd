"""Semantic search: index documents in a vector database with an embedding model, and query it.

    python examples/semantic_search.py index --index runs/search --model runs/embeddings/model --source docs
    python examples/semantic_search.py index --index runs/search --model runs/embeddings/model \\
        --source 'corpus/*.parquet' --column body --id_column url
    python examples/semantic_search.py query --index runs/search --text "how is padding removed?"
    python examples/semantic_search.py query --index runs/search --text "ECONNRESET" --keyword_weight 0.5
    python examples/semantic_search.py remove --index runs/search --name /where/docs/were

`-h` after `index`, `query` or `remove` lists the settings of that command. The database is LanceDB in the folder
`--index`, which needs no server. With `--weaviate_url http://localhost:8080` it is a collection in Weaviate, and
`--index` is its name.

Run `index` again when documents have changed: unchanged documents are not embedded again, and documents that are gone
from the source are removed. A source that was moved counts as a new source: `index` prints the names of the other
sources in the index, and `remove` removes one of them. After an interruption, run the same command again to continue.
The index stores how its vectors were made, and refuses another model or other settings.
"""

import sys

from neobert_hf_cli import run


if __name__ == "__main__":
    if sys.argv[1:2] not in (["index"], ["query"], ["remove"]):
        sys.exit("usage: semantic_search.py {index,query,remove} [--setting value ...]")
    run(sys.argv[1], sys.argv[2:])
