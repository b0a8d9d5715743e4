"""`graph`: questions about a small directed graph given by its arrows (edges).

A template is the graph up to renaming its nodes, with the question. The dial `size` is the maximum number of nodes;
`complexity` adds question kinds (`KINDS`) and arrows beyond a tree. Worked solutions visit node by node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from paceline.tasks.answers import ANSWER_WORD
from paceline.tasks.procedural import LETTERS, Dice, TemplateDials, TemplateTask

KINDS = ("path", "reach", "parts")
"""Length of the shortest path between two nodes; number of reachable nodes; number of connected components."""

LEVELS = (
    TemplateDials(size=6),
    TemplateDials(size=8, complexity=1),
    TemplateDials(size=10, complexity=2),
    TemplateDials(size=14, complexity=3),
)

ALPHABET = f"{LETTERS}0123456789: \n"
WORDS = (*KINDS, ANSWER_WORD)

Arrow = tuple[int, int]
Node = TypeVar("Node", bound=Hashable)


@dataclass(frozen=True)
class GraphTemplate:
    kind: str
    arrows: tuple[Arrow, ...]
    asked: tuple[int, ...]
    """path: source and target; reach: source; parts: nothing."""


class Graph(TemplateTask[GraphTemplate]):
    """Shortest paths, reachable nodes and connected components of a small directed graph."""

    name = "graph"
    levels = LEVELS
    alphabet = ALPHABET
    words = WORDS

    def draw_template(self, dice: Dice) -> GraphTemplate | None:
        complexity = self.dials.complexity
        kind = KINDS[dice.below(min(complexity + 1, len(KINDS)))]
        num_nodes = dice.between(max(3, self.dials.size - 1), self.dials.size)
        arrows = draw_arrows(dice, num_nodes, num_extra=complexity * num_nodes // 6, is_torn=kind == "parts")
        if kind == "parts":
            return GraphTemplate(kind, arrows, ()) if arrows else None
        # Draw the answer first, so that all answers are equally likely although most pairs of nodes are neighbours.
        questions = sorted(_questions(kind, arrows).items())
        return GraphTemplate(kind, arrows, dice.choice(dice.choice(questions)[1]))

    def key_of(self, template: GraphTemplate) -> str:
        colours = refine_colours(template.arrows, template.asked)
        asked = " ".join(str(colours[node]) for node in template.asked)
        arrows = sorted((colours[start], colours[end]) for start, end in template.arrows)
        return f"{template.kind} {asked}: {' '.join(f'{start}>{end}' for start, end in arrows)}"

    def dress(self, template: GraphTemplate, dice: Dice) -> tuple[str, dict[str, Any]]:
        names = dice.sample(LETTERS, 1 + max(max(arrow) for arrow in template.arrows))
        arrows = [names[start] + names[end] for start, end in dice.sample(template.arrows, len(template.arrows))]
        asked = [names[node] for node in template.asked]
        value = str(visit(template.kind, arrows, asked)[-1][1])
        answer = {"value": value, "kind": template.kind, "arrows": arrows, "asked": asked}
        return self._prompt(template.kind, arrows, asked), answer

    def _prompt(self, kind: str, arrows: Sequence[str], asked: Sequence[str]) -> str:
        if self.dials.style == "compact":
            return f"{' '.join((kind, *asked))}: {' '.join(arrows)}\n"
        question = {
            "path": "How many arrows are on the shortest way from {} to {}?",
            "reach": "How many other nodes can be reached from {} along the arrows?",
            "parts": "Into how many parts does the graph fall when arrows may be walked both ways?",
        }
        listed = ", ".join(f"{arrow[0]}->{arrow[1]}" for arrow in arrows)
        return (
            f"A directed graph has the arrows {listed}. {question[kind].format(*asked)} "
            f"Write a last line of the form: {ANSWER_WORD} NUMBER"
        )

    def work(self, answer: Mapping[str, Any], dice: Dice) -> str:
        arrows = dice.sample(answer["arrows"], len(answer["arrows"]))
        return " ".join(f"{node}{number}" for node, number in visit(answer["kind"], arrows, answer["asked"]))


def draw_arrows(dice: Dice, num_nodes: int, num_extra: int, is_torn: bool) -> tuple[Arrow, ...]:
    """Arrows that join each node to one shortly before it (in a torn graph: not each), and some extra ones."""
    arrows: dict[Arrow, None] = {}
    for number in range(num_nodes + num_extra - 1):
        node = number + 1 if number + 1 < num_nodes else dice.between(1, num_nodes - 1)
        if is_torn and dice.below(3) == 0:
            continue
        earlier = node - 1 - dice.below(min(node, dice.between(1, 2)))
        arrow = (node, earlier) if dice.below(8) == 0 else (earlier, node)
        arrows[arrow] = None
    return tuple(arrows)


def _questions(kind: str, arrows: Sequence[Arrow]) -> dict[int, list[tuple[int, ...]]]:
    """The nodes a question may name, by its answer."""
    questions: dict[int, list[tuple[int, ...]]] = {}
    for source in sorted({start for start, _ in arrows}):
        distances = distances_from(source, arrows)
        if kind == "reach":
            questions.setdefault(len(distances) - 1, []).append((source,))
        else:
            for target, distance in list(distances.items())[1:]:
                questions.setdefault(distance, []).append((source, target))
    return questions


def distances_from(source: Node, arrows: Iterable[Sequence[Node]]) -> dict[Node, int]:
    """Distance of every reachable node, nearest first, neighbours in the order of the arrows."""
    ends: dict[Node, list[Node]] = {}
    for start, end in arrows:
        ends.setdefault(start, []).append(end)
    distances = {source: 0}
    queue = deque([source])
    while queue:
        node = queue.popleft()
        for end in ends.get(node, ()):
            if end not in distances:
                distances[end] = distances[node] + 1
                queue.append(end)
    return distances


def visit(kind: str, arrows: Sequence[str], asked: Sequence[str]) -> list[tuple[str, int]]:
    """The nodes visited to answer a question, in order, each with a number; the last number is the answer.

    The number is the distance (path), the count of nodes reached (reach), or the index of the component (parts).
    """
    if kind == "parts":
        return _number_parts(arrows)
    distances = list(distances_from(asked[0], arrows).items())
    if kind == "reach":
        return [(node, count) for count, (node, _) in enumerate(distances)]
    places = [node for node, _ in distances]
    return distances[: places.index(asked[1]) + 1]


def _number_parts(arrows: Sequence[str]) -> list[tuple[str, int]]:
    both_ways = [text for arrow in arrows for text in (arrow, arrow[::-1])]
    parts: dict[str, int] = {}
    for start in (arrow[0] for arrow in both_ways):
        if start not in parts:
            number = max(parts.values(), default=0) + 1
            parts.update(dict.fromkeys(distances_from(start, both_ways), number))
    return list(parts.items())


def refine_colours(arrows: Sequence[Arrow], asked: Sequence[int]) -> dict[int, int]:
    """A number for every node that describes its place in the graph, whatever the nodes are called.

    Nodes start with their role in the question and are refined by the colours of their neighbours until nothing
    changes. Isomorphic graphs always agree; a few others may too, which only makes the split of templates coarser.
    """
    ends: dict[int, list[int]] = {node: [] for arrow in arrows for node in arrow}
    starts: dict[int, list[int]] = {node: [] for node in ends}
    for start, end in arrows:
        ends[start].append(end)
        starts[end].append(start)
    colours = {node: asked.index(node) + 1 if node in asked else 0 for node in ends}
    num_colours = 0
    while len(set(colours.values())) > num_colours:
        num_colours = len(set(colours.values()))
        looks = {
            node: (
                colours[node],
                tuple(sorted([colours[end] for end in ends[node]])),
                tuple(sorted([colours[start] for start in starts[node]])),
            )
            for node in ends
        }
        ranks = {look: rank for rank, look in enumerate(sorted(set(looks.values())))}
        colours = {node: ranks[look] for node, look in looks.items()}
    return colours
