"""Draw `architecture.svg`: the parts of a run and the way of the data. Standard library only.

python docs/draw_architecture.py            # writes the picture beside this file
"""

from __future__ import annotations

from html import escape
from pathlib import Path

WIDTH, HEIGHT = 1000, 560
TARGET = Path(__file__).with_name("architecture.svg")
COLOURS = {
    "work": "#6b7280",
    "tokens": "#2563eb",
    "outcomes": "#059669",
    "credit": "#d97706",
    "weights": "#9333ea",
}
LEGEND = [
    ("work", "work, requests"),
    ("tokens", "sampled tokens"),
    ("outcomes", "outcomes"),
    ("credit", "credit"),
    ("weights", "weights"),
]
STYLE = """
.title { text-anchor: middle; font-weight: 600 }
text { font: 14px system-ui, sans-serif; fill: #111827 } .small { font-size: 12px; fill: #4b5563 }
.part { fill: #f9fafb; stroke: #374151 } .role { fill: #eff6ff; stroke: #1d4ed8 }
.stream { fill: #ecfdf5; stroke: #047857 } .ground { fill: #ffffff; stroke: #d1d5db }
path { fill: none; stroke-width: 2 }
"""

# name: (left, top, width, height, class, title, second line)
BOXES = {
    "designer": (40, 60, 200, 60, "role", "designer", "writes environments, hints"),
    "agent": (280, 60, 200, 60, "role", "agent", "plays episodes"),
    "evaluator": (520, 60, 200, 60, "role", "evaluator", "plays held-out suites"),
    "sandbox": (40, 150, 320, 46, "part", "sandbox", "validates and runs the programs"),
    "pool": (400, 150, 320, 46, "part", "inference pool", "routes requests to vLLM servers"),
    "task": (60, 260, 180, 56, "stream", "TASK", "work queues with leases"),
    "event": (300, 260, 180, 56, "stream", "EVENT", "facts: outcomes, versions"),
    "sample": (540, 260, 180, 56, "stream", "SAMPLE", "tokens and credit"),
    "scorer": (160, 400, 220, 60, "role", "scorer", "curriculum, regret, advantages"),
    "learner": (520, 400, 220, 60, "role", "learner", "replay buffer, TRL, checkpoints"),
    "server": (780, 150, 180, 46, "role", "server", "one per vLLM process"),
    "vllm": (780, 60, 180, 60, "part", "vLLM", "samples token ids"),
}

# kind, label, label position, points of the line
ARROWS = [
    ("work", "tickets, episodes", (66, 362), [(200, 400), (150, 316)]),
    ("work", "", (0, 0), [(110, 260), (110, 226), (24, 226), (24, 90), (40, 90)]),
    ("outcomes", "outcomes", (316, 226), [(380, 120), (380, 260)]),
    ("outcomes", "", (0, 0), [(380, 316), (320, 400)]),
    (
        "tokens",
        "tokens, once",
        (646, 220),
        [(450, 120), (450, 136), (735, 136), (735, 226), (630, 226), (630, 260)],
    ),
    ("tokens", "", (0, 0), [(640, 316), (640, 400)]),
    (
        "credit",
        "credit: sample ids, advantages",
        (390, 352),
        [(380, 430), (450, 430), (450, 360), (580, 360), (580, 316)],
    ),
    ("weights", "new weights", (788, 330), [(740, 430), (870, 430), (870, 196)]),
    ("weights", "", (0, 0), [(870, 150), (870, 120)]),
    ("work", "", (0, 0), [(720, 173), (755, 173), (755, 90), (780, 90)]),
]


def box(left: int, top: int, width: int, height: int, kind: str, title: str, note: str) -> str:
    """Return a rounded box with a title and a second line."""
    x, y = left + width / 2, top + height / 2
    return (
        f'<rect class="{kind}" x="{left}" y="{top}" width="{width}" height="{height}" rx="8"/>'
        f'<text class="title" x="{x}" y="{y - 3}">{escape(title)}</text>'
        f'<text class="small" x="{x}" y="{y + 15}" text-anchor="middle">{escape(note)}</text>'
    )


def arrow(kind: str, label: str, at: tuple[int, int], points: list[tuple[int, int]]) -> str:
    """Return a line through ``points`` with a head at its end, and its label."""
    line = "M" + " L".join(f"{x} {y}" for x, y in points)
    text = f'<text class="small" x="{at[0]}" y="{at[1]}" style="fill:{COLOURS[kind]}">{escape(label)}</text>'
    return f'<path d="{line}" stroke="{COLOURS[kind]}" marker-end="url(#{kind})"/>' + (text if label else "")


def draw() -> str:
    """Return the picture as SVG."""
    heads = "".join(
        f'<marker id="{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" style="fill:{colour};stroke:none"/></marker>'
        for kind, colour in COLOURS.items()
    )
    legend = "".join(
        f'<path d="M{40 + 180 * i} 526 h36" stroke="{COLOURS[kind]}" marker-end="url(#{kind})"/>'
        f'<text class="small" x="{84 + 180 * i}" y="530">{escape(text)}</text>'
        for i, (kind, text) in enumerate(LEGEND)
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            'aria-label="Parts of a run and the way of the data">',
            f"<style>{STYLE}</style><defs>{heads}</defs>",
            f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10"/>',
            '<rect class="ground" x="40" y="244" width="700" height="88" rx="10"/>',
            '<text class="small" x="640" y="258">NATS JetStream</text>',
            *(box(*BOXES[name]) for name in BOXES),
            *(arrow(*parts) for parts in ARROWS),
            legend,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    TARGET.write_text(draw())
