"""Draw docs/images/pool.svg, the diagram of candidate pools: `python tools/draw_pool.py`."""

from __future__ import annotations

import random
from pathlib import Path

TOKENS, LATENTS, K, POOL = 6, 16, 2, 4
CELL, GAP, LEFT, TOP = 20, 60, 20, 62
INK, GRID, POOLED, KEPT = "#1a1a1a", "#d5d5d5", "#f4dcb0", "#0072b2"  # the last one is of the Okabe-Ito palette


def panel(x: int, title: str, note: str, z: list[list[float]], pool: set[int], per_token: bool) -> list[str]:
    """One method: the values that it keeps of the same activations."""
    cells = [(z[t][j], t, j) for t in range(TOKENS) for j in sorted(pool)]
    kept = {(t, j) for _, t, j in sorted(cells, reverse=True)[: K * TOKENS]}
    if per_token:
        rows = [sorted((cell for cell in cells if cell[1] == t), reverse=True)[:K] for t in range(TOKENS)]
        kept = {(t, j) for row in rows for _, t, j in row}
    parts = [
        f'<text x="{x}" y="24" font-weight="bold">{title}</text>',
        f'<text x="{x}" y="44" font-size="12">{note}</text>',
    ]
    for t in range(TOKENS):
        for j in range(LATENTS):
            color = KEPT if (t, j) in kept else POOLED if j in pool and len(pool) < LATENTS else "none"
            place = f'x="{x + j * CELL}" y="{TOP + t * CELL}" width="{CELL}" height="{CELL}"'
            parts.append(f'<rect {place} fill="{color}" stroke="{GRID}"/>')
    return parts


def main() -> None:
    random.seed(3)
    strength = [random.random() ** 2 for _ in range(LATENTS)]
    z = [[random.random() * (0.3 + strength[j]) for j in range(LATENTS)] for _ in range(TOKENS)]
    z[2] = [1.6 * value for value in z[2]]  # a token with large activations takes more of the shared budget
    score = [sum(row[j] ** 2 for row in z) for j in range(LATENTS)]
    pool = set(sorted(range(LATENTS), key=lambda j: -score[j])[:POOL])
    every = set(range(LATENTS))
    wide = LATENTS * CELL + GAP
    parts = panel(LEFT, "TopK", "each token keeps its K largest values", z, every, True)
    parts += panel(LEFT + wide, "BatchTopK", "the batch keeps its K B largest values", z, every, False)
    parts += panel(LEFT + 2 * wide, "Sampled-SAE", "the same, inside the pool of K l latents", z, pool, False)
    width, height = LEFT + 3 * wide - GAP + 20, TOP + TOKENS * CELL + 40
    legend = "rows: tokens of a batch; columns: latents; blue: kept; shaded: candidate pool"
    foot = f'<text x="{LEFT}" y="{height - 14}" font-size="12">{legend}</text>'
    style = f'font-family="system-ui, sans-serif" font-size="15" fill="{INK}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {style}>'
    back = f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>'
    path = Path(__file__).parents[1] / "docs" / "images" / "pool.svg"
    path.write_text("\n".join([head, back, *parts, foot, "</svg>\n"]), encoding="utf-8")


if __name__ == "__main__":
    main()
