"""The drawings of docs/architecture.md: recipes, the block, a padded batch as one row, and a run that is killed.

python benchmarks/pictures.py
"""

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from runner import BLUE, GREY, LIGHT, ORANGE, ROOT

from neobert_hf.common.files import write_png


FOLDER = ROOT / "docs/images"
# Fills of boxes: the colour of the repository, mixed with white.
PALE_BLUE, PALE_ORANGE, PALE_GREY = "#e3ecf7", "#fae6d8", "#f1f1f1"


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure whose axes count inches from its lower left corner, and are not shown."""
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


@dataclass
class Box:
    """A box with a text in it, around a centre; `note` stands in grey to its right."""

    x: float
    y: float
    width: float
    text: str
    color: str = BLUE
    fill: str = PALE_BLUE
    note: str = ""
    height: float = 0.36

    def draw(self, axes: Axes) -> None:
        corner = (self.x - self.width / 2, self.y - self.height / 2)
        look = {"boxstyle": "round,pad=0,rounding_size=0.06", "facecolor": self.fill, "edgecolor": self.color}
        axes.add_patch(FancyBboxPatch(corner, self.width, self.height, linewidth=1.2, **look))
        axes.text(self.x, self.y, self.text, ha="center", va="center", fontsize=10, color="#222222")
        if self.note:
            axes.text(self.x + self.width / 2 + 0.15, self.y, self.note, va="center", fontsize=9, color=GREY)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str = GREY) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 1.3, "shrinkA": 0})


def title(axes: Axes, message: str, unit: str) -> None:
    """Above a drawing; in grey what it shows."""
    top = axes.get_ylim()[1]
    axes.text(0.15, top - 0.22, message, fontweight="bold", fontsize=12, va="center")
    axes.text(0.15, top - 0.5, unit, color=GREY, fontsize=9.5, va="center")


# What recipes read and write, and where it is drawn.
THINGS = {
    "raw text": (0.9, 3.9),
    "tokenizer": (3.6, 3.9),
    "tokens": (3.6, 2.6),
    "original\ncheckpoint": (3.6, 1.1),
    "masked\nlanguage model": (5.9, 2.6),
    "embedding\nmodel": (8.9, 3.9),
    "classifier": (8.9, 2.6),
    "a search": (11.6, 3.9),
    "scores": (11.6, 2.9),
    "the Hub,\na server": (11.6, 1.1),
}
# From, to, the recipes' names, where these stand on the arrow (0 is its beginning), and how it is bent.
RECIPES = [
    ("raw text", "tokenizer", "train_tokenizer", 0.45, 0.0),
    ("raw text", "tokens", "prepare_data", 0.42, 0.0),
    ("tokenizer", "tokens", "", 0.5, 0.0),
    ("tokens", "masked\nlanguage model", "pretrain", 0.4, 0.0),
    ("original\ncheckpoint", "masked\nlanguage model", "convert", 0.5, 0.0),
    ("masked\nlanguage model", "embedding\nmodel", "finetune_embeddings", 0.45, 0.0),
    ("masked\nlanguage model", "classifier", "classify, tag,\nanswer, regress", 0.45, 0.0),
    ("embedding\nmodel", "a search", "index, query", 0.45, 0.0),
    ("embedding\nmodel", "scores", "run_mteb", 0.5, 0.0),
    ("classifier", "the Hub,\na server", "doctor, export,\npublish", 0.5, 0.0),
    ("masked\nlanguage model", "the Hub,\na server", "", 0.5, 0.15),
    ("embedding\nmodel", "the Hub,\na server", "", 0.5, -0.1),
]


def recipe_box(text: str) -> Box:
    return Box(*THINGS[text], 1.35, text, height=0.34 + 0.2 * text.count("\n"))


def border(box: Box, other: Box) -> tuple[float, float]:
    """A point just outside of a box, on the line from its centre to that of another."""
    across, up = other.x - box.x, other.y - box.y
    share = 1.1 / max(abs(across) / (box.width / 2), abs(up) / (box.height / 2))
    return box.x + share * across, box.y + share * up


def recipes_picture() -> Figure:
    """What each recipe makes of what."""
    figure, axes = canvas(12.5, 5.2)
    title(axes, "An arrow is a recipe", "a box is a folder that one recipe writes and others read")
    for source, target, names, share, bend in RECIPES:
        first, last = recipe_box(source), recipe_box(target)
        look = {"arrowstyle": "-|>", "color": GREY, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0}
        look["connectionstyle"] = f"arc3,rad={bend}"
        start, end = border(first, last), border(last, first)
        axes.annotate("", end, start, arrowprops=look, zorder=0)
        place = [low + share * (high - low) for low, high in zip(start, end)]
        around = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.text(*place, names, ha="center", va="center", fontsize=9, color=ORANGE, bbox=around if names else None)
    for text in THINGS:
        recipe_box(text).draw(axes)
    note = "pretrain --init_from adapts a masked language model, distil makes a small embedding model of a large one."
    axes.text(0.15, 0.3, note, va="center", fontsize=9, color=GREY)
    return figure


# The two halves of a block: how high each begins, and its steps with their shapes in the published model.
HALVES = {
    0.95: {
        "attention_norm": "RMSNorm",
        "qkv": "768 to 3 x 768: for each of 12\nheads, query, key and value of 64",
        "RoPE": "turns adjacent pairs of query\nand key by their position",
        "attention": "every token with all of its\nown text; softmax(q k / 8) v",
        "wo": "768 to 768",
    },
    4.0: {
        "ffn_norm": "RMSNorm",
        "ffn.w12": "768 to 2 x 2,048: gate and up",
        "SwiGLU": "silu(gate) x up",
        "ffn.w3": "2,048 to 768",
    },
}
WITHOUT_PARAMETERS = ("RoPE", "attention", "SwiGLU")


def block_picture() -> Figure:
    """A block from below to above, as its parameters are called, with the shapes of the published model."""
    figure, axes = canvas(7.6, 7.2)
    stream, middle, width = 1.1, 3.3, 2.3
    title(axes, "One of 28 blocks", "from below to above; blue has parameters, by their names, and orange has none")
    axes.plot([stream, stream], [0.35, 6.3], color=BLUE, linewidth=2.2, zorder=0)
    for bottom, steps in HALVES.items():
        heights = [bottom + 0.52 * place for place in range(len(steps))]
        arrow(axes, (stream, heights[0]), (middle - width / 2, heights[0]))
        for (name, note), height in zip(steps.items(), heights):
            look = (ORANGE, PALE_ORANGE) if name in WITHOUT_PARAMETERS else (BLUE, PALE_BLUE)
            Box(middle, height, width, name, *look, note=note).draw(axes)
        for lower, upper in zip(heights, heights[1:]):
            arrow(axes, (middle, lower + 0.18), (middle, upper - 0.18))
        top = heights[-1] + 0.48
        axes.plot([middle, middle], [heights[-1] + 0.18, top], color=GREY, linewidth=1.3)
        arrow(axes, (middle, top), (stream + 0.14, top))
        axes.plot(stream, top, marker="o", markersize=19, color="white", markeredgecolor=BLUE, markeredgewidth=1.4)
        axes.text(stream, top, "+", ha="center", va="center", fontsize=14, color=BLUE)
    arrow(axes, (stream, 6.2), (stream, 6.42), BLUE)
    axes.text(stream, 0.2, "residual stream, 768 numbers a token", ha="left", va="center", fontsize=9, color=BLUE)
    axes.text(stream + 0.2, 6.35, "to the next block; after the last, layer_norm", va="center", fontsize=9, color=BLUE)
    return figure


def padding_picture() -> Figure:
    """Three texts of a padded batch become one row; its states return to the places of the batch."""
    figure, axes = canvas(7.6, 4.3)
    texts = [("the", "cat", "sat", "down", "."), ("rain", "."), ("read", "the", "file")]
    looks = [(BLUE, PALE_BLUE), (ORANGE, PALE_ORANGE), (GREY, PALE_GREY)]
    size = 0.58
    title(axes, "A padded batch inside the model", "what is computed in each block is one row of real tokens")
    longest, left = max(map(len, texts)), 2.2
    axes.text(0.15, 2.9, "the batch\n(3, 5)", va="center", fontsize=9.5)
    for row, (text, (color, fill)) in enumerate(zip(texts, looks)):
        for column in range(longest):
            place = (left + column * size, 3.3 - 0.42 * row)
            word = text[column] if column < len(text) else "[PAD]"
            shown = (color, fill) if column < len(text) else (LIGHT, "white")
            Box(*place, size - 0.05, word, *shown, height=0.34).draw(axes)
    axes.text(left + 4.9 * size, 2.9, "5 of 15 places\nare padding", va="center", fontsize=9, color=GREY)

    arrow(axes, (left + 2 * size, 2.18), (left + 2 * size, 1.72))
    axes.text(left + 2.2 * size, 1.95, "padding is taken out, wherever it lies", va="center", fontsize=9, color=GREY)

    axes.text(0.15, 1.45, "one row\n(1, 10)", va="center", fontsize=9.5)
    start, size = 1.55, 0.56
    place = 0
    for text, (color, fill) in zip(texts, looks):
        for word in text:
            Box(start + place * size, 1.45, size - 0.05, word, color, fill, height=0.34).draw(axes)
            place += 1
        first, last = start + (place - len(text)) * size - 0.2, start + (place - 1) * size + 0.2
        axes.plot([first, last], [1.16, 1.16], color=color, linewidth=2)
        axes.text((first + last) / 2, 0.98, "attention", ha="center", va="center", fontsize=8.5, color=color)
    apart = "Offsets 0, 5, 7 and 10 keep the texts apart: no token sees another text."
    back = "After the last block the states go back to (3, 5, width), with zeros at padding."
    axes.text(start - 0.26, 0.48, f"{apart}\n{back}", fontsize=9, va="center", linespacing=1.7)
    return figure


def resuming_picture() -> Figure:
    """Steps of two runs: one that is killed and repeated, and one that nobody disturbed."""
    figure, axes = canvas(7.6, 3.6)
    unit = "on a CPU bit for bit; here with a checkpoint every 500 steps"
    title(axes, "A run that is killed goes on, and ends with the same weights", unit)
    left, right, total = 2.0, 6.9, 2000

    def at(step: float) -> float:
        return left + (right - left) * step / total

    def run(height: float, name: str, first: int, last: int) -> None:
        axes.text(0.15, height, name, va="center", fontsize=9.5)
        axes.plot([at(first), at(last)], [height, height], color=BLUE, linewidth=4, solid_capstyle="butt")
        for step in range(500, total, 500):
            if first < step <= last:
                axes.plot(at(step), height, "o", markersize=10, color="white", markeredgecolor=BLUE, markeredgewidth=2)

    run(2.4, "the command", 0, 1300)
    axes.plot(at(1300), 2.4, marker="X", markersize=12, color=ORANGE)
    axes.text(at(1300) + 0.15, 2.4, "kill -9 at step 1,300", va="center", fontsize=9, color=ORANGE)
    axes.plot([at(1000), at(1000)], [2.28, 1.78], color=GREY, linewidth=1.2, linestyle=":")
    newest = "newest complete checkpoint:\nweights, optimizer, cursor, seeds"
    axes.text(at(1000) - 0.1, 2.03, newest, ha="right", va="center", fontsize=8.5, color=GREY)
    run(1.6, "the same command", 1000, total)
    axes.text(at(1150), 1.32, "these steps\nare done again", ha="center", va="center", fontsize=8.5, color=GREY)
    run(0.7, "nobody kills it", 0, total)
    axes.plot(at(total), 1.6, marker="s", markersize=11, color=BLUE)
    axes.plot(at(total), 0.7, marker="s", markersize=11, color=BLUE)
    axes.plot([at(total), at(total)], [1.45, 0.85], color=BLUE, linewidth=1.2, linestyle=":")
    axes.text(at(total) - 0.1, 1.15, "equal", ha="right", va="center", fontsize=9.5, color=BLUE)
    for step in range(0, total + 1, 500):
        axes.text(at(step), 0.3, f"{step:,}", ha="center", va="center", fontsize=8.5, color=GREY)
    axes.text(0.15, 0.3, "step", va="center", fontsize=8.5, color=GREY)
    return figure


def main() -> None:
    drawings = {"recipes": recipes_picture, "block": block_picture, "padding": padding_picture}
    for name, draw in (drawings | {"resuming": resuming_picture}).items():
        write_png(FOLDER / f"{name}.png", draw())


if __name__ == "__main__":
    main()
