"""Made-up tasks: sound items, strict scores, honest worked solutions, splits that never meet, and names that help."""

from __future__ import annotations

import ast
import dataclasses
import json
import operator
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.config import Settings, SettingsError, dump, load, validate
from paceline.tasks import countdown
from paceline.tasks.answers import final_answer
from paceline.tasks.base import Item, LevelledTask, Split, WorkedTask
from paceline.tasks.checks import check
from paceline.tasks.countdown import Countdown
from paceline.tasks.counting import Counting
from paceline.tasks.graph import Arrow, Graph, draw_arrows
from paceline.tasks.graph import GraphTemplate as GraphTemplate
from paceline.tasks.procedural import TEST_SHARE, Dice, split_of
from paceline.tasks.registry import make_task, task_names
from paceline.tasks.settings import TaskSettings
from paceline.tasks.spatial import Spatial

MadeUp = Countdown | Counting | Graph | Spatial
KINDS: tuple[type[MadeUp], ...] = (Countdown, Counting, Graph, Spatial)
ALL_LEVELS = [kind(level) for kind in KINDS for level in range(len(kind.levels))]
EASY = Countdown()


def level_id(task: MadeUp) -> str:
    return f"{task.name}-{task.level}"


each_level = pytest.mark.parametrize("task", ALL_LEVELS, ids=level_id)
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def items_of(task: MadeUp, count: int, split: Split = "train", seed: int = 0) -> list[Item]:
    return [task.item(seed, index, split) for index in range(count)]


# --- what every task owes ---------------------------------------------------------------------------------------------


@each_level
def test_every_level_is_sound(task: MadeUp) -> None:
    report = check(task, num_items=40)
    assert report.problems == () and report.num_items == 40
    assert isinstance(task, WorkedTask) and isinstance(task, LevelledTask)


@each_kind
def test_chat_style_is_sound_and_needs_no_other_answers(kind: type[MadeUp]) -> None:
    for level in range(len(kind.levels)):
        compact, chat = kind(level), kind(level, {"style": "chat"})
        assert check(chat, num_items=9).problems == ()
        for index in range(9):
            plain, item = compact.item(0, index), chat.item(0, index)
            assert (plain.answer, plain.key) == (item.answer, item.key)
            assert "answer" in item.prompt and item.prompt != plain.prompt


def test_items_are_the_same_in_another_process() -> None:
    script = (
        "from paceline.tasks.registry import make_task\n"
        "from paceline.tasks.settings import TaskSettings\n"
        "for name in ('countdown', 'counting', 'graph', 'spatial'):\n"
        "    task = make_task(TaskSettings(name=name, level=3))\n"
        "    for split in ('train', 'test'):\n"
        "        item = task.item(11, 5, split)\n"
        "        print(repr((item, task.worked(item, 2))))\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    expected = []
    for kind in KINDS:
        task = kind(3)
        for split in ("train", "test"):
            item = task.item(11, 5, split)
            expected.append(repr((item, task.worked(item, 2))))
    assert run.stdout.splitlines() == expected


@each_kind
def test_5000_items_are_5000_draws(kind: type[MadeUp]) -> None:
    task = kind(len(kind.levels) - 1)
    assert len({task.item(3, index).prompt for index in range(5000)}) > 4990


@each_kind
def test_seeds_and_indices_are_hashed_and_not_added(kind: type[MadeUp]) -> None:
    task = kind(len(kind.levels) - 1)
    of_seed = {seed: {item.prompt for item in items_of(task, 300, seed=seed)} for seed in range(3)}
    assert not of_seed[0] & of_seed[1] and not of_seed[1] & of_seed[2] and not of_seed[0] & of_seed[2]


def test_small_spaces_repeat_no_more_than_chance() -> None:
    """Draws of countdown's easiest dial that meet: as many as if each draw were independent of all others."""
    task = Countdown(0, {"max_number": 6})
    first, second = ([task.item(seed, index).key for index in range(2000)] for seed in (0, 1))
    within = sum(a == b for a, b in pairwise(first)) + len(first) - len(set(first))
    other = Counter(second)
    across = sum(other[key] for key in first) / len(first) ** 2
    pairs = sum(count * (count - 1) for count in Counter(first).values()) / (len(first) * (len(first) - 1))
    assert within > 0 and abs(pairs / across - 1) < 0.1


@each_kind
def test_train_and_test_never_meet_at_any_level_or_seed(kind: type[MadeUp]) -> None:
    keys: dict[Split, set[str]] = {"train": set(), "test": set()}
    for level in range(len(kind.levels)):
        for split, known in keys.items():
            known.update(item.key for seed in range(2) for item in items_of(kind(level), 80, split, seed))
    assert not keys["train"] & keys["test"]
    assert all(split_of(kind.name, key) == split for split, known in keys.items() for key in known)


@each_level
def test_the_test_split_is_not_a_handful(task: MadeUp) -> None:
    assert len({item.key for item in items_of(task, 150, "test")}) >= 30


def test_one_key_in_eight_is_held_out() -> None:
    num_test = sum(split_of("countdown", str(key)) == "test" for key in range(16_000))
    assert abs(num_test - 16_000 / TEST_SHARE) < 4.5 * (16_000 * (1 / TEST_SHARE) * (1 - 1 / TEST_SHARE)) ** 0.5
    assert [split_of("a", str(key)) for key in range(99)] != [split_of("b", str(key)) for key in range(99)]


def test_an_empty_split_is_an_error_that_says_what_to_do() -> None:
    task = Countdown(0, {"size": 2, "max_number": 1})  # 1+1=2 is all there is
    with pytest.raises(ValueError, match=r"split is empty; turn up task\.dials"):
        [task.item(0, 0, split) for split in ("train", "test")]


@each_kind
def test_alphabet_and_words_spell_every_text(kind: type[MadeUp]) -> None:
    """A tokenizer of these pieces can write all of it, and needs each of them."""
    text = ""
    for level in range(len(kind.levels)):
        task = kind(level)
        text += "".join(item.prompt + task.worked(item, 1) for item in items_of(task, 80))
    assert set(re.sub("|".join(kind.words), "", text)) == set(kind.alphabet)
    assert all(word in text for word in kind.words)


@each_kind
def test_other_seeds_work_in_other_ways(kind: type[MadeUp]) -> None:
    task = kind(2)
    item = task.item(0, 1)
    texts = {task.worked(item, seed) for seed in range(20)}
    assert len(texts) > 1 and task.worked(item, 3) == task.worked(item, 3)


# --- dials and levels -------------------------------------------------------------------------------------------------


@each_kind
def test_levels_get_harder_and_score_each_other(kind: type[MadeUp]) -> None:
    task = kind()
    sizes = [level.size for level in kind.levels]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]
    for level in range(task.num_levels):
        item = task.at_level(level).item(0, 0)
        assert item.level == level and task.score(item, task.at_level(level).gold(item)) == 1


@pytest.mark.parametrize("level", [-1, 4, 99])
def test_a_level_that_is_not_there_is_an_error(level: int) -> None:
    with pytest.raises(SettingsError, match=rf"task\.level: graph has levels 0 to 3, got {level}"):
        Graph(level)


def test_dials_stay_as_set_at_every_level() -> None:
    task = Countdown(1, {"operators": "+", "max_chars": 300})
    assert (task.dials.operators, task.dials.complexity) == ("+", 1)
    assert (task.at_level(4).dials.operators, task.at_level(4).dials.size) == ("+", 5)
    assert all(set(item.answer["solution"]) <= set("0123456789+()=") for item in items_of(task, 50))


@pytest.mark.parametrize(
    ("dials", "message"),
    [
        ({"sizes": 3}, "task.dials of countdown: unknown setting sizes: did you mean size?"),
        ({"operator": "+"}, "task.dials of countdown: unknown setting operator: did you mean operators?"),
        ({"size": 1}, "task.dials of countdown: size: .*greater than or equal to 2, got 1"),
        ({"operators": "+^"}, "task.dials of countdown: operators: "),
        ({"min_number": 30}, "min_number 30 is above max_number 20"),
        ({"style": "loud"}, "task.dials of countdown: style: .*'compact' or 'chat', got 'loud'"),
    ],
)
def test_a_wrong_dial_is_named(dials: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Countdown(0, dials)


@pytest.mark.parametrize("kind", [Counting, Graph, Spatial], ids=lambda kind: kind.name)
def test_diversity_limits_the_templates_of_the_train_split_only(kind: type[Counting | Graph | Spatial]) -> None:
    task = kind(2, {"diversity": 5})
    items = items_of(task, 200)
    assert 1 < len({item.key for item in items}) <= 5
    assert len({item.prompt for item in items}) > 100
    assert items_of(task, 50, "test") == items_of(kind(2), 50, "test")


# --- countdown: items and worked solutions ----------------------------------------------------------------------------

SIGNS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def value_of(text: str) -> Fraction:
    """An expression's value by Python's own grammar: the twin that the task's parser is held against."""

    def walk(node: ast.expr) -> Fraction:
        if isinstance(node, ast.BinOp):
            return SIGNS[type(node.op)](walk(node.left), walk(node.right))
        assert isinstance(node, ast.Constant) and type(node.value) is int
        return Fraction(node.value)

    return walk(ast.parse(text.strip(), mode="eval").body)


def numbers_in(text: str) -> list[int]:
    return sorted(map(int, re.findall(r"\d+", text)))


@pytest.mark.parametrize("level", range(len(countdown.LEVELS)))
def test_countdown_items_have_a_solution_that_takes_work(level: int) -> None:
    task = Countdown(level)
    for item in items_of(task, 100):
        numbers, target = item.answer["numbers"], item.answer["target"]
        expression, *_ = item.answer["solution"].split("=")
        assert len(numbers) == task.dials.size and 1 <= min(numbers) <= max(numbers) <= task.dials.max_number
        assert target not in numbers and 1 <= target <= task.dials.max_value
        assert value_of(expression) == target and numbers_in(expression) == sorted(numbers)
        assert item.prompt == f"{' '.join(map(str, numbers))} > {target}\n"
        assert item.key == f"{' '.join(map(str, sorted(numbers)))} > {target}"


@pytest.mark.parametrize("level", range(len(countdown.LEVELS)))
def test_every_try_of_a_search_is_true_and_only_the_last_one_hits(level: int) -> None:
    task = Countdown(level)
    for item in items_of(task, 15):
        *lines, answer = task.worked(item, seed=4).split("\n")
        tries = [line.rstrip("<>") for line in lines]
        for line in tries:
            steps = line.split("=")
            assert len(steps) == task.dials.size, "each step does one operation"
            assert len({value_of(step) for step in steps}) == 1, line
            assert numbers_in(steps[0]) == sorted(item.answer["numbers"])
            assert max(numbers_in(line)) <= task.dials.max_value
        values, target = [value_of(line.split("=")[0]) for line in tries], item.answer["target"]
        assert [value == target for value in values] == [False] * (len(tries) - 1) + [True]
        signs = ["<" if value < target else ">" if value > target else "" for value in values]
        assert lines == [line + sign for line, sign in zip(tries, signs, strict=True)]
        assert answer == f"answer {tries[-1].split('=')[0]}"


def test_lengths_of_searches_have_a_long_tail() -> None:
    easy = sorted(len(EASY.worked(item, 0)) for item in items_of(EASY, 400))
    assert 60 < sum(easy) / 400 < 160 and easy[-1] > 400 and easy[-20] > 2.5 * easy[200]
    hard = Countdown(4)
    lengths = [len(hard.worked(item, 0)) for item in items_of(hard, 80)]
    assert max(lengths) > 3000


@given(level=st.integers(0, 4), index=st.integers(0, 10**6), seed=st.integers(-(2**63), 2**63 - 1))
def test_a_worked_solution_keeps_its_limit(level: int, index: int, seed: int) -> None:
    task = Countdown(level, {"max_chars": 100})
    item = task.item(0, index)
    assert len(task.worked(item, seed)) <= 100 and task.score(item, task.worked(item, seed)) == 1


def test_a_search_that_remembers_never_tries_twice() -> None:
    forgetful = [EASY.worked(item, 0).split("\n")[:-1] for item in items_of(EASY, 60)]
    remembers = Countdown(0, {"repeats": False})
    careful = [remembers.worked(item, 0).split("\n")[:-1] for item in items_of(remembers, 60)]
    assert all(len(set(tries)) == len(tries) for tries in careful)
    assert any(len(set(tries)) < len(tries) for tries in forgetful)


def test_a_search_ends_even_where_its_dials_cannot_reach_the_target() -> None:
    hard_item = Countdown(0, {"operators": "*", "max_value": 9999}).item(0, 0)
    only_sums = Countdown(0, {"operators": "+", "repeats": False, "max_chars": 100})
    assert only_sums.score(hard_item, only_sums.worked(hard_item, 0)) == 1


# --- countdown: the score ---------------------------------------------------------------------------------------------

ITEM = Item(prompt="3 7 2 > 19\n", answer={"numbers": [3, 7, 2], "target": 19, "solution": "7*3-2=21-2=19"}, key="")
THIRDS = Item(prompt="8 3 3 > 24\n", answer={"numbers": [8, 3, 8, 3], "target": 24, "solution": ""}, key="")


@pytest.mark.parametrize(
    "text",
    [
        "answer 7*3-2",
        "answer: 3*7-2",
        "  Answer : ( 3 * 7 ) - 2  ",
        "ANSWER 7*3-2=19",
        "answer (((7))*(3)-2)",
        "tries\n1+1=3\nanswer 7*3-2\n",
        "answer 1\nanswer 7*3-2",
        "so <answer>7*3-2</answer> it is",
        "<answer>\n7*3-2\n</answer>",
        "answer 4\n<answer>7*3-2</answer>",
        "<answer>4</answer>\nanswer 7*3-2",
    ],
)
def test_a_right_answer_passes(text: str) -> None:
    assert EASY.score(ITEM, text) == 1


def test_fractions_are_exact() -> None:
    assert EASY.score(THIRDS, "answer 8/(3-8/3)") == 1
    assert EASY.score(THIRDS, "answer 8/(3-3)*8") == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7*3-2",
        "answer",
        "answer 19",
        "answer 7*3",  # a number is left
        "answer 7*3-2+3-3",  # a number twice
        "answer 7*3-1*2",  # a number that is not there
        "answer 7*3-2=20",
        "answer 7*3-2=19=19",
        "answer 7*3-2 or 7*3-1",
        "answer 7*3-2\nanswer 4",
        "answers 7*3-2",
        "my answer 7*3-2",
        "answer 7*3--2",
        "answer -2+7*3",
        "answer +7*3-2",
        "answer 7*3-2)",
        "answer (7*3-2",
        "answer 7)*3-(2",
        "answer ()7*3-2",
        "answer 7*3-2()",
        "answer (7)(3)-2",
        "answer 7 3*2",
        "answer 73-2",
        "answer 07*3-2",
        "answer 7.0*3-2",
        "answer 7**3-2",
        "answer 7//3-2",
        "answer 7×3-2",
        "answer 7*3-2#",
        "answer \u0667*\u0663-\u0662",
        "answer ７*３-２",
        "answer 7*3-2+len('')",
        "<answer>7*3-2",
        "7*3-2</answer>",
        "</answer>7*3-2<answer>",
        "anſwer 7*3-2",
    ],
)
def test_a_wrong_answer_does_not(text: str) -> None:
    assert EASY.score(ITEM, text) == 0


def test_format_credit_is_for_legal_answers_only() -> None:
    task = Countdown(0, {"format_credit": 0.125})
    assert task.score(ITEM, "answer 7*2-3") == 0.125
    assert task.score(ITEM, "answer 7*3-2") == 1
    assert [task.score(ITEM, text) for text in ("answer 7*3", "answer 7*2-3)", "answer 3/(7-7)", "answer", "")] == [
        0
    ] * 5


HUGE = 400_000


@pytest.mark.parametrize(
    "text",
    [
        "answer " + "(" * HUGE + "7*3-2" + ")" * HUGE,
        "answer " + "9" * HUGE,
        "answer " + "9*" * HUGE + "9",
        "answer " + " " * HUGE + "7*3-2" + " " * HUGE + "x",
        "answer 9" + "/9" * HUGE,
        "<answer>" * HUGE,
        "</answer>" * HUGE,
        "<answer>" * HUGE + "7" + "</answer>" * HUGE,
        "answer\n" * HUGE,
        "answer:" * HUGE,
        " " * HUGE,
        ("\t" * 1000 + "answe\n") * (HUGE // 1000),
        "\n" * HUGE + "answer 9**9**9**9",
        "answer 7*3-2\x00",
        "answer 1e999-7*3+2",
        "answer __import__('os').system('true')",
        "answer " + "\ud800" * 10,
    ],
    ids=lambda text: text[:12].encode("unicode_escape").decode(),
)
def test_hostile_texts_are_read_in_linear_time_and_fail(text: str) -> None:
    """No clock: a quadratic search of these texts does not end within the patience of any test run."""
    assert all(task.score(task.item(0, 0), text) == 0 for task in (EASY, Counting(), Graph(), Spatial()))
    assert EASY.score(ITEM, text) == 0


def test_brackets_may_nest_as_deep_as_an_answer_is_long() -> None:
    assert EASY.score(ITEM, f"answer {'(' * 90}7*3-2{')' * 90}") == 1


@given(
    st.lists(st.sampled_from(["7", "3", "2", "+", "-", "*", "/", "(", ")", " ", "answer ", "\n", "=19"]), max_size=24)
)
def test_the_parser_agrees_with_python_or_says_no(pieces: list[str]) -> None:
    answer = "".join(pieces)
    tokens = countdown.read_tokens(answer)
    value = None if tokens is None else countdown.evaluate(tokens)
    try:
        # Python would take signs and doubled operators, which are no part of a countdown expression.
        is_odd = re.search(r"(^|[-+*/(])\s*[-+]|\*\s*\*|/\s*/|\(\s*\)|\n", answer)
        expected = None if is_odd else value_of(answer)
    except (SyntaxError, ZeroDivisionError, AssertionError, KeyError):
        expected = None
    assert value == expected


@st.composite
def trees(draw: st.DrawFn, depth: int = 4) -> countdown.Tree:
    if depth == 0 or draw(st.booleans()):
        return draw(st.integers(0, 99))
    return draw(st.sampled_from("+-*/")), draw(trees(depth - 1)), draw(trees(depth - 1))


@given(trees())
def test_a_rendered_tree_reads_back_as_the_same_value(tree: countdown.Tree) -> None:
    def value(node: countdown.Tree) -> Fraction:
        return Fraction(node) if isinstance(node, int) else countdown.EXACT[node[0]](value(node[1]), value(node[2]))

    tokens = countdown.read_tokens(countdown.render(tree))
    if tokens is None:
        assert len(countdown.render(tree)) > countdown.MAX_EXPRESSION_LENGTH
        return
    try:
        expected: Fraction | None = value(tree)
    except ZeroDivisionError:
        expected = None
    assert countdown.evaluate(tokens) == expected


@given(st.text(alphabet="answer<>/ \n:(7*3-2)=é٣", max_size=200))
def test_no_text_breaks_a_score(text: str) -> None:
    for kind in KINDS:
        assert kind().score(kind().item(0, 0), text) in (0, 1)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("answer 4", "4"),
        ("answer: 4", "4"),
        ("Answer : 4 \nbye", "4"),
        ("answer 4\nanswer 5", "5"),
        ("answer", ""),
        ("answer4", None),
        ("the answer 4", None),
        ("<answer> 4 </answer>", "4"),
        ("answer: <answer>4</answer>", "4"),
        ("<answer>4", None),
        ("<answer>3</answer><answer>4</answer>", "4"),
        ("answer " + "4" * 401, None),
        ("", None),
    ],
)
def test_the_last_answer_is_the_final_one(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


# --- counting, graph, spatial: answers against slow twins that read the prompt ----------------------------------------


def recount(prompt: str) -> int:
    question, _, row = prompt.removeprefix("count ").strip().partition(": ")
    if question == "twice":
        return sum(row.count(letter) > 1 for letter in set(row) - {" "})
    if len(question) == 2:
        return sum(a + b == question for a, b in pairwise(row.split()))
    return sum(row.count(letter) for letter in question.split())


@pytest.mark.parametrize("level", range(4))
def test_counts_are_right(level: int) -> None:
    task = Counting(level)
    items = items_of(task, 200)
    assert [task.score(item, f"answer {recount(item.prompt)}") for item in items] == [1] * 200
    assert len({item.key.split()[0] for item in items}) == level + 1, "every kind of question comes up"


def solve_graph(prompt: str) -> int:
    question, _, arrows = prompt.strip().partition(": ")
    kind, *asked = question.split()
    nodes = sorted(set(arrows) - {" "})
    far = len(nodes) + 1
    steps = {(a, b): 0 if a == b else 1 if a + b in arrows.split() else far for a in nodes for b in nodes}
    if kind == "parts":
        steps = {(a, b): min(steps[a, b], steps[b, a]) for a in nodes for b in nodes}
    for via in nodes:
        for a in nodes:
            for b in nodes:
                steps[a, b] = min(steps[a, b], steps[a, via] + steps[via, b])
    if kind == "path":
        return steps[asked[0], asked[1]]
    if kind == "reach":
        return sum(0 < steps[asked[0], b] < far for b in nodes)
    return len({tuple(steps[a, b] < far for b in nodes) for a in nodes})


@pytest.mark.parametrize("level", range(4))
def test_graph_answers_are_right(level: int) -> None:
    task = Graph(level)
    items = items_of(task, 100)
    assert [task.score(item, f"answer {solve_graph(item.prompt)}") for item in items] == [1] * 100
    assert len({item.key.split()[0] for item in items}) == min(level + 1, 3)


@given(seed=st.integers(0, 2**63), asked=st.sampled_from([(), (0,), (0, 2), (2, 0)]), data=st.data())
def test_a_graph_is_the_same_template_by_any_names(seed: int, asked: tuple[int, ...], data: st.DataObject) -> None:
    arrows = draw_arrows(Dice(seed), num_nodes=6, num_extra=2, is_torn=False)
    names = data.draw(st.permutations(range(9)))

    def rename(arrow: Arrow) -> Arrow:
        return names[arrow[0]], names[arrow[1]]

    renamed = tuple(data.draw(st.permutations([rename(arrow) for arrow in arrows])))
    key = Graph().key_of(GraphTemplate("path", arrows, asked))
    assert Graph().key_of(GraphTemplate("path", renamed, tuple(names[node] for node in asked))) == key
    assert Graph().key_of(GraphTemplate("path", (*arrows, (0, 9)), asked)) != key


def walk_grid(prompt: str) -> str:
    question, _, told = prompt.strip().partition(": ")
    compass = {"N": 1j, "E": 1 + 0j, "S": -1j, "W": -1 + 0j}
    place, facing = 0j, 1j
    kind, *asked = question.split()
    if asked:
        facts = {fact[-1]: (fact[0], compass[fact[1]] * int(fact[2:-1])) for fact in told.split()}
        thing = asked[1]
        while thing != asked[0]:
            thing, step = facts[thing]
            place += step
    else:
        for move in told.split():
            facing = compass.get(move[0], facing * {"L": 1j, "R": -1j}.get(move[0], 1 + 0j))
            place += facing * int(move[1:]) * (-1 if move[0] == "B" else 1)
    x, y = int(place.real), int(place.imag)
    return f"{x}, {y}" if kind == "where" else str(abs(x) + abs(y))


@pytest.mark.parametrize("level", range(4))
def test_places_and_distances_are_right(level: int) -> None:
    task = Spatial(level)
    items = items_of(task, 200)
    assert [task.score(item, f"answer {walk_grid(item.prompt)}") for item in items] == [1] * 200
    assert len({item.key.split()[1] for item in items}) == level + 1


@pytest.mark.parametrize("kind", [Counting, Graph, Spatial], ids=lambda kind: kind.name)
def test_only_the_exact_answer_passes(kind: type[Counting | Graph | Spatial]) -> None:
    task = kind()
    item = task.item(0, 0)
    value = item.answer["value"]
    assert [task.score(item, f"answer {text}") for text in (value, f" {value}. ")] == [1, 1]
    for text in (f"{value}0", f"+{value}", f"0{value}", f"{value} or 1", f"{value}\nanswer no", f"{value}..", ""):
        assert task.score(item, f"answer {text}") == 0


@pytest.mark.parametrize("kind", [Counting, Graph, Spatial], ids=lambda kind: kind.name)
def test_the_work_arrives_at_the_answer(kind: type[Counting | Graph | Spatial]) -> None:
    task = kind(3)
    for index, item in enumerate(items_of(task, 150)):
        work = task.worked(item, index).rpartition("\n")[0]
        numbers = re.findall(r"-?\d+", work)
        if kind is not Spatial:
            assert numbers[-1] == item.answer["value"], (item.prompt, work)
        elif item.key.startswith("where"):
            x_line, _, y_line = work.partition("\n")
            x = re.findall(r"-?\d+", x_line)[-1] if y_line else numbers[-2]
            assert f"{x},{numbers[-1]}" == item.answer["value"], (item.prompt, work)


def test_worked_templates_say_what_they_count() -> None:
    count, reach, where = Counting(), Graph(1), Spatial()
    item = Item("", {"value": "2", "kind": "one", "row": list("abca"), "asked": ["a"]}, "")
    assert {count.worked(item, seed) for seed in range(9)} == {"a1 b1 c1 a2\nanswer 2", "a1 c1 b1 a2\nanswer 2"}
    item = Item("", {"value": "2", "kind": "reach", "arrows": ["ab", "ac", "da"], "asked": ["a"]}, "")
    assert {reach.worked(item, seed) for seed in range(9)} == {"a0 b1 c2\nanswer 2", "a0 c1 b2\nanswer 2"}
    item = Item("", {"value": "-3,2", "moves": "FL", "amounts": [2, 3], "names": []}, "")
    ways = {"N0,2 W-3,2\nanswer -3,2", "x N0 W-3\ny N2 W2\nanswer -3,2"}
    assert {where.worked(item, seed) for seed in range(9)} == ways


# --- the proof itself can fail ----------------------------------------------------------------------------------------


class Faulty(Countdown):
    """Countdown with one fault."""


class SolvedByAll(Faulty):
    def score(self, item: Item, text: str) -> float:
        return 1.0


class SolvedByPrompt(Faulty):
    def score(self, item: Item, text: str) -> float:
        return 1.0 if text == item.prompt else super().score(item, text)


class SolvedByLong(Faulty):
    def score(self, item: Item, text: str) -> float:
        return 1.0 if len(text) > 50_000 else super().score(item, text)


class OutOfRange(Faulty):
    def score(self, item: Item, text: str) -> float:
        return super().score(item, text) or float("nan")


class WrongGold(Faulty):
    def gold(self, item: Item) -> str:
        return "answer 1"


class WrongWork(Faulty):
    def worked(self, item: Item, seed: int) -> str:
        return "1+1=2"


class Forgetful(Faulty):
    num_calls = 0

    def item(self, seed: int, index: int, split: Split = "train") -> Item:
        self.num_calls += 1
        return super().item(seed, index + self.num_calls, split)


class Leaky(Faulty):
    def item(self, seed: int, index: int, split: Split = "train") -> Item:
        return super().item(seed, index)


class Unsendable(Faulty):
    def item(self, seed: int, index: int, split: Split = "train") -> Item:
        item = super().item(seed, index, split)
        return dataclasses.replace(item, answer={**item.answer, "numbers": tuple(item.answer["numbers"])})


class Constant(Faulty):
    def item(self, seed: int, index: int, split: Split = "train") -> Item:
        return super().item(seed, 0, split)


class AnyNumbers(Faulty):
    def score(self, item: Item, text: str) -> float:
        return float(bool(re.fullmatch(r"answer [-+*/()\d]+", text)) and len(text) < 99)


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        (SolvedByAll(), "is solved by an empty text: train item 0, 1, 2 and 17 more"),
        (SolvedByAll(), "is solved by its own prompt: test item 0, 1, 2 and 27 more"),
        (SolvedByPrompt(), "is solved by its own prompt: train item"),
        (SolvedByLong(), "is solved by a huge number"),
        (OutOfRange(), "is solved by an empty text"),
        (WrongGold(), "is not solved by its own answer: train item 0"),
        (WrongWork(), "is not solved by its worked solution"),
        (Forgetful(), "changes when it is asked for again"),
        (Leaky(), "train and test share an item"),
        (Unsendable(), "does not survive a trip through JSON"),
        (Constant(), "one constant answer solves 100% of the items"),
        (AnyNumbers(), "is solved by another item's answer"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Countdown) else "",
)
def test_the_check_finds_a_faulty_task(task: Countdown, problem: str) -> None:
    report = check(task, num_items=30)
    assert not report.is_sound
    assert any(re.search(problem, text) for text in report.problems), report.problems


# --- names and settings -----------------------------------------------------------------------------------------------


def test_every_made_up_task_is_in_the_table() -> None:
    for kind in KINDS:
        task = make_task(TaskSettings(name=kind.name, level=1, dials={"style": "chat"}))
        assert type(task) is kind and isinstance(task, kind)
        assert (task.level, task.dials.style, task.size) == (1, "chat", None)
    assert {kind.name for kind in KINDS} <= set(task_names()) and TaskSettings().name == "countdown"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("coutdown", r"task\.name: unknown task 'coutdown': did you mean countdown\?"),
        ("Graphs", r"did you mean graph\?"),
        ("chess", r"unknown task 'chess': there are countdown, counting, graph, spatial"),
        ("countdown:3", r"did you mean countdown\?"),
        ("", "unknown task '': there are countdown"),
    ],
)
def test_an_unknown_task_names_the_nearest(name: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make_task(TaskSettings(name=name))


@pytest.mark.parametrize("name", ["9" * 5000, "x" * 5000 + ".py"])
def test_an_unknown_task_of_any_length_is_one_short_line(name: str) -> None:
    with pytest.raises(SettingsError, match="unknown task") as raised:
        make_task(TaskSettings(name=name))
    assert len(str(raised.value)) < 500


def test_a_made_up_task_takes_no_data_and_no_reward() -> None:
    with pytest.raises(SettingsError, match=r"task\.data: countdown has its own"):
        make_task(TaskSettings(data="items.jsonl"))
    with pytest.raises(SettingsError, match=r"task\.reward: graph has its own"):
        make_task(TaskSettings(name="graph", reward="rewards:exact"))


class Root(Settings):
    task: TaskSettings = TaskSettings()


def test_settings_come_from_the_command_line_and_survive_yaml() -> None:
    given = {"task.name": "graph", "task.level": "2", "task.dials.size": "9", "task.dials.style": "chat"}
    root = load(Root, None, {**given, "task.data": "null", "task.max_level": "3"})
    assert root.task.dials == {"size": 9, "style": "chat"} and type(root.task.dials["size"]) is int
    task = make_task(root.task)
    assert isinstance(task, Graph) and (task.dials.size, task.dials.complexity) == (9, 2)
    assert validate(Root, json.loads(root.model_dump_json())) == root
    assert "  dials:\n    size: 9\n    style: chat\n" in dump(root)
    assert load(Root, None, {"task.reward": "my/rewards.py:exact"}).task.reward == "my/rewards.py:exact"


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("task.levle", "1", r"unknown setting task\.levle: did you mean task\.level\?"),
        ("task.curriculum", "hard", "task.curriculum: .*'adaptive', got 'hard'"),
        ("task.reward", "my/rewards.py", "task.reward: "),
        ("task.level", "-1", "task.level: .*0, got -1"),
        ("task.seed", str(2**63), "task.seed: "),
        ("task.grader_cpu_seconds", "0", "task.grader_cpu_seconds: "),
        ("task.grader_workers", "0", "task.grader_workers: "),
        ("task.dials", "7", "task.dials: "),
    ],
)
def test_a_wrong_setting_is_named(key: str, text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load(Root, None, {key: text})
