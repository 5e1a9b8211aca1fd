"""`benchmarks/gpu.py` on a CPU, with a tiny model."""

from gpu import main


def test_every_way_gets_a_row(tmp_path):
    sizes = "--layers 1 --width 64 --tokens 64 --lengths 16 --seconds 0 --types float32".split()
    main([*sizes, "--output", str(tmp_path / "gpu.md")])
    text = (tmp_path / "gpu.md").read_text()
    assert "transformers" in text and "`python benchmarks/gpu.py --layers 1 " in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("|")][2:]
    ways = [row[:5] for row in rows if "bare product" not in row[0]]
    assert ways == [
        [f"| {step}", "float32", "sdpa", "16", layout]
        for step in ("forward pass", "training step")
        for layout in ("dense", "padded", "packed")
    ]
    assert all(float(row[5].replace(",", "")) > 0 for row in rows[2:])
