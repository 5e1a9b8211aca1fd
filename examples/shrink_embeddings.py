"""Cut a smaller embedding model out of a large one, without the layers and units that its embeddings need least.

    python examples/shrink_embeddings.py --model runs/embeddings/model --texts my_texts/ --num_hidden_layers 14

`output_dir` gets `model/` (a Sentence Transformers model), `report.md`, `report.json` and `shrink.png`. Afterwards,
train the small model to reproduce the embeddings of the large one:
`examples/finetune_embeddings.py --teacher ... --distillation mse`.
"""

from pathlib import Path

from neobert_hf.common.locks import folder_lock
from neobert_hf.common.script_errors import run_script
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
        # 2. The large model, and texts of the kind that the small model will embed
        model, sizes = load_large_model(settings)
        texts = read_texts(settings)
        parameters = sum(weight.numel() for weight in model.parameters())
        wanted = embeddings_to_keep(model, texts[1])

        # 3. The cut, which removes the layers and units that the embeddings need least
        cut = cut_encoder(model, sizes, texts[0])

        # 4. A linear layer that maps the outputs of the cut model as close as possible to the large model's embeddings
        lost = fit_linear_layer(model, texts[1], wanted)

        # 5. The model and the report
        print(save_cut(model, cut, lost, settings, texts, parameters), flush=True)


if __name__ == "__main__":
    run_script(main)
