"""A smaller embedding model cut out of a large one: without the layers and units that its embeddings need least.

    python examples/shrink_embeddings.py --model runs/embeddings/model --texts my_texts/ --num_hidden_layers 14

`output_dir` gets `model/`, a Sentence Transformers model, `report.md`, `report.json` and `shrink.png`. Train it then to
give the embeddings of the large one: `examples/finetune_embeddings.py --teacher ... --distillation mse`.
"""

from pathlib import Path

from neobert_hf.common.locks import folder_lock
from neobert_hf.common.settings import parse_config
from neobert_hf.embeddings.shrinking import (
    EmbeddingCutSettings,
    cut_encoder,
    embeddings_to_keep,
    fit_linear_layer,
    load_large_model,
    read_texts,
    save_cut,
)


def main(args: list[str] | None = None) -> None:
    # 1. Settings
    (settings,) = parse_config(EmbeddingCutSettings, args=args)
    with folder_lock(Path(settings.output_dir)):
        # 2. The large model, and texts of the kind that it will read
        model, sizes = load_large_model(settings)
        texts = read_texts(settings)
        parameters = sum(weight.numel() for weight in model.parameters())
        wanted = embeddings_to_keep(model, texts[1])

        # 3. The cut: what the embeddings need least
        cut = cut_encoder(model, sizes, texts[0])

        # 4. A linear layer that brings what is left nearest to the embeddings of the large model
        lost = fit_linear_layer(model, texts[1], wanted)

        # 5. The model and the report
        print(save_cut(model, cut, lost, settings, texts, parameters), flush=True)


if __name__ == "__main__":
    main()
